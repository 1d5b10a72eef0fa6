"""Thousands of strings that tokenizers get wrong: scripts of the world, code, white space, emoji, numbers, bytes.

Made from fixed seeds. Random characters are among those of Unicode 3.2, so that peers with older tables agree on them.
"""
# ruff: noqa: E501, SIM905

from __future__ import annotations

import random
from functools import cache
from unicodedata import ucd_3_2_0

SENTENCES = """
The quick brown fox jumps over the lazy dog. It's 7 o'clock; we'll see, they've said, I'M HERE, don'T, y'all'd've
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Straßenbahnhaltestellenschild ÄÖÜẞ
Voix ambiguë d’un cœur qui, au zéphyr, préfère les jattes de kiwis. «Où est l'été ?» — là-bas…
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío, ¿añoraba a su querido cachorro? ¡Sí!
Pchnąć w tę łódź jeża lub ośm skrzyń fig. Příliš žluťoučký kůň úpěl ďábelské ódy. Çağdaş Türkçe İstanbul ığdır
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Съешь же ещё этих мягких французских булок, да выпей чаю. Їжак і ґава
דג סקרן שט בים מאוכזב ולפתע מצא לו חברה. نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ومغلف بجلد أزرق
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले विष्णुवतार भगवान श्रीराम। আমি বাংলায় গান গাই
யாமறிந்த மொழிகளிலே தமிழ்மொழி போல் இனிதாவது எங்கும் காணோம். తెలుగు లిపి చాలా అందంగా ఉంటుంది ಕನ್ನಡ ಭಾಷೆ മലയാളം
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ພາສາລາວ ភាសាខ្មែរ မြန်မာဘာသာ བོད་སྐད། ქართული ენა հայերեն
いろはにほへと ちりぬるを わかよたれそ つねならむ。東京特許許可局、今日もＦＵＬＬＷＩＤＴＨ１２３！カタカナ ﾊﾝｶｸ
天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。我们今天去吃饭吧？「好的」——《论语》 키스의 고유조건은 입술끼리 만나야 하고 ㄱㄴㄷ
አማርኛ ፊደል ᠮᠣᠩᠭᠣᠯ ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ ދިވެހި Tiếng Việt có dấu: Nguyễn Thị Phương được không? ɪntəˈnæʃənəl ˈfɒnɪks
𝔗𝔥𝔢 𝒬𝓊𝒾𝒸𝓀 𝟙𝟚𝟛 ①②③ ½ ⅔ ² ³ ₄ Ⅷ ﬁ ﬀ Å Å ñ n\u0303 e\u0301\u0323 Z\u0351\u036b\u0343a\u0363\u0368l\u034a\u036b
∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β), 2H₂ + O₂ ⇌ 2H₂O, R = 4.7 kΩ, ⌀ 200 mm ← → ↯ € £ ¥ ₹ ₿ ©®™ † ‡ § ¶ • ░▒▓█
🙂 👍🏽 👩‍👩‍👧‍👦 👨🏿‍🚀 🏳️‍🌈 🇩🇪🇯🇵🇺🇸 ❤️ ☠️ 1️⃣ 🧑‍🤝‍🧑 🤷‍♀️ a🙂b 🙂🙂🙂🙂 ✨✨ ⚠️ text︎ 🫠
<|im_start|>user<|im_end|> <bos><eos><unk><s></s><pad> <start_of_turn>model <0x0A> <unused12> [INST] <<SYS>> <|eot_id|> <|
""".strip().splitlines()

CODE = [
    'def f(x: int) -> str:\n    """Doc."""\n    if x >= 10:\n\t\treturn f"{x:>08.3f}"\n    return [i**2 for i in range(10)]\n',
    '#include <stdio.h>\nint main(void) {\n\tfor (int i = 0; i < 0xFF; ++i)\n\t\tprintf("%d\\n", i << 2 | 3);\n\treturn 0;\n}\n',
    '<html>\n<body class="a-b_c">\n  <table><tr><td>1</td></tr></table>\n  <!-- no -->&nbsp;&#8364;\n</body>\n</html>\n> </div>',
    "const f = async (a, b) => { await a?.b ?? c; return `${a}\\u00e9${b}`; };\r\n// CRLF\r\n\r\n/* x */\r\n",
    "SELECT COUNT(*) FROM t WHERE x <> 'it''s' AND y IS NOT NULL GROUP BY 1 HAVING n >= 3;\n\n\n\n",
    'fn main() -> Result<(), Box<dyn Error>> { let v: Vec<_> = s.split("::").map(|x| x.len()).collect(); Ok(()) }',
    "https://user:p%40ss@example.org:8080/a/b.c?d=e&f=%20#g mailto:x.y+z@example.co.uk C:\\Users\\x\\n ../../etc/passwd",
    '{"a": [1, 2.5e-10, -3], "b": {"c": null, "d": true}, "e": "\\ud83d\\ude00 \\"q\\""}\n',
    "$ grep -rnE '^[[:space:]]*#' . | awk '{print $1}' | xargs -0 -I{} sed -i 's/a/b/g' {} && echo \"done: $?\"\n",
    "# Title\n\n- item 1\n  - item 1.1\n    1. one\n\n| a | b |\n|---|---|\n| `x` | **y** |\n\n```py\nprint('hi')\n```\n",
]

RANGES = """
0020-007e 00a0-00ff 0100-024f 0250-02af 0300-036f 0370-03ff 0400-04ff 0530-058f 0590-05ff 0600-06ff 0700-074f 0900-097f
0980-09ff 0a00-0aff 0b80-0bff 0c00-0cff 0d00-0dff 0e00-0eff 0f00-0fff 1000-109f 10a0-10ff 1100-11ff 1200-137f 13a0-13ff
1400-14ff 1780-17ff 1800-18af 1e00-1eff 1f00-1fff 2000-206f 2070-209f 20a0-20bf 2100-214f 2150-218f 2190-22ff 2300-23ff
2460-24ff 2500-25ff 2600-27bf 2800-28ff 3000-303f 3040-309f 30a0-30ff 3100-312f 3130-318f 3200-33ff 3400-34ff 4e00-9fff
a000-a0ff ac00-d7a3 e000-e0ff f900-faff fb00-fb4f fe00-fe0f fe30-fe6f ff00-ffef 10300-1032f 1d400-1d7ff 20000-200ff
""".split()

SPACES = [
    " ",
    "  ",
    "\n",
    "\t",
    "\r\n",
    "\r",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u2028",
    "\x0b",
    "\x0c",
    "\x85",
    "\u200b",
    "\u2581",
]
PIECES = [
    "'s", "'LL", "'t", "'", '"', "a", "Z", "word", "Über", "ß", "日", "한", "я", "ि", "\u0301", "🙂", "\u200d", "0", "12", "345", "6789",
    ".", ",", "...", "!?", "(", ")", "_", "-", "--", "/", "\\", "#", "$", "%", "^", "&", "*", "=", "<", ">", "|", "~", "`", "@", "½",
    "Ⅷ", "²", "١٢", "\x00", "\x1b", "\x7f", "\ufeff", "\ufffd", "\ue000",
]  # fmt: skip


@cache
def alphabets() -> list[str]:
    """The characters of each range that have been in Unicode for decades."""
    bounds = (map(lambda x: int(x, 16), pair.split("-")) for pair in RANGES)
    return ["".join(c for c in map(chr, range(a, b + 1)) if ucd_3_2_0.category(c) != "Cn") for a, b in bounds]


@cache
def texts(seed: int = 5) -> list[str]:
    """About 4,000 strings."""
    pick = random.Random(seed)
    found = ["", *SENTENCES, *CODE, "\n".join(SENTENCES), "".join(CODE)]
    found += [word for sentence in SENTENCES for word in sentence.split()]
    for sentence in SENTENCES + CODE:  # cut anywhere, in and out of order
        for _ in range(15):
            a, b = sorted(pick.choices(range(len(sentence) + 1), k=2))
            found.append(sentence[a:b] + pick.choice(SPACES) * pick.randint(0, 3) + sentence[:a][-9:])
    for alphabet in alphabets():
        found += ["".join(pick.choices(alphabet, k=pick.randint(1, 24))) for _ in range(12)]
    everything = "".join(alphabets())
    found += ["".join(pick.choices(everything, k=pick.randint(1, 40))) for _ in range(200)]
    found += ["".join(pick.choices(SPACES, k=pick.randint(1, 12))) + pick.choice(PIECES) for _ in range(300)]
    found += ["".join(pick.choices(PIECES + SPACES, k=pick.randint(2, 16))) for _ in range(1200)]
    found += [
        pick.choice(PIECES) + space * n + pick.choice(["", "x", "1"])
        for space in SPACES
        for n in (1, 2, 3, 31, 32, 70)
    ]
    found += ["".join(pick.choices("0123456789.,eE+-x ", k=pick.randint(1, 30))) for _ in range(150)]
    found += [c * n for c in "aA0.=-_/#!ä字🙂" for n in (3, 17, 64, 500)]
    found += ["".join(pick.choices("abcdefghijklmnopqrstuvwxyz", k=n)) for n in (40, 100, 1000, 5000)]
    return found


@cache
def byte_strings(seed: int = 6) -> list[bytes]:
    """About 600 strings that are hardly ever valid UTF-8."""
    pick = random.Random(seed)
    found = [pick.randbytes(pick.randint(1, 40)) for _ in range(300)]
    for sentence in SENTENCES:
        raw = sentence.encode()
        for _ in range(15):
            a, b = sorted(pick.choices(range(len(raw) + 1), k=2))
            found.append(raw[a:b] + pick.randbytes(pick.randint(0, 2)) + raw[: a // 2])
    return [
        *found,
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\xf4\x90\x80\x80",
        b"\xe2\x82",
        b"\xf0\x9f\x99",
        b"\xff" * 9,
    ]
