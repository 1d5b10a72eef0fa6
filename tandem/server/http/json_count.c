// Counts the values of a JSON text without parsing it: each one costs a parser time and memory.
#include "core.h"

enum { NAME = 8 };  // values that take as long as a name, which a parser hashes and a model checks

// Commas, colons and opening brackets outside strings, that is, about as many as there are values and names. The text
// may be invalid.
EXPORT int64_t tandem_json_count(const uint8_t *text, int64_t n) {
    int64_t count = 0;
    for (int64_t at = 0; at < n; at++) {
        if (text[at] == '"')
            for (at++; at < n && text[at] != '"'; at++) at += text[at] == '\\';
        else
            count += text[at] == ':' ? NAME : text[at] == ',' || text[at] == '[' || text[at] == '{';
    }
    return count;
}
