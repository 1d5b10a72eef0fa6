// Compiles Slang modules to SPIR-V through Slang's COM interface: the wheel that has the compiler has no command for it.
// usage: compile_shaders FOLDER OUT MODULE...   writes OUT/MODULE.spv with all entry points that MODULE itself defines.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>
#include "slang.h"
#include "slang-deprecated.h"

static const uint32_t OP_FUNCTION = 54, DONT_INLINE = 2;

static int fail(const char *what, ISlangBlob *log) {
    fprintf(stderr, "%s\n%s", what, log ? (const char *)log->getBufferPointer() : "");
    return 1;
}

static int compile(slang::ISession *session, slang::IModule *module, const std::string &path) {
    std::vector<slang::IComponentType *> parts{module};
    for (int i = 0; i < module->getDefinedEntryPointCount(); i++) {
        slang::IEntryPoint *entry = nullptr;
        module->getDefinedEntryPoint(i, &entry);
        parts.push_back(entry);
    }
    slang::IComponentType *program = nullptr, *linked = nullptr;
    ISlangBlob *log = nullptr, *code = nullptr;
    if (SLANG_FAILED(session->createCompositeComponentType(parts.data(), parts.size(), &program, &log))) return fail(path.c_str(), log);
    if (SLANG_FAILED(program->link(&linked, &log))) return fail(path.c_str(), log);
    if (SLANG_FAILED(linked->getTargetCode(0, &code, &log))) return fail(path.c_str(), log);
    std::ofstream file(path, std::ios::binary);
    auto *words = (uint32_t *)code->getBufferPointer();
    file.write((const char *)words, 5 * sizeof *words);
    for (size_t at = 5; at < code->getBufferSize() / sizeof *words; at += words[at] >> 16) {
        const uint32_t op = words[at] & 0xffff;
        // [noinline] keeps Slang's optimiser from copying a function into each caller; a driver shall inline it.
        if (op == OP_FUNCTION) words[at + 3] &= ~DONT_INLINE;
        // Without OpSource and OpName: smaller, and tools that are older than Slang refuse its number for a language.
        if (op < 2 || op > 6) file.write((const char *)(words + at), (words[at] >> 16) * sizeof *words);
    }
    return file.good() ? 0 : fail("cannot write the output", nullptr);
}

int main(int argc, char **argv) {
    if (argc < 4) return fail("usage: compile_shaders FOLDER OUT MODULE...", nullptr);
    setenv("SLANG_RUN_SPIRV_VALIDATION", "1", 1);
    slang::IGlobalSession *global = nullptr;
    if (SLANG_FAILED(slang_createGlobalSession(SLANG_API_VERSION, &global))) return fail("cannot start Slang", nullptr);
    slang::TargetDesc target;
    target.format = SLANG_SPIRV;
    target.profile = global->findProfile("spirv_1_5");  // the version that Vulkan 1.2 takes
    target.flags = SLANG_TARGET_FLAG_GENERATE_SPIRV_DIRECTLY;
    slang::SessionDesc desc;
    desc.targets = &target;
    desc.targetCount = 1;
    desc.searchPaths = argv + 1;
    desc.searchPathCount = 1;
    slang::CompilerOptionEntry options[3];
    options[0].name = slang::CompilerOptionName::DisableWarning;  // a shader uses subgroups: all our devices have them
    options[0].value.kind = slang::CompilerOptionValueKind::String;
    options[0].value.stringValue0 = "41012";
    // NVIDIA's driver does not do all of this itself: without it a prompt takes a quarter longer.
    options[1].name = slang::CompilerOptionName::Optimization;
    options[1].value.intValue0 = SLANG_OPTIMIZATION_LEVEL_HIGH;
    options[2].name = slang::CompilerOptionName::VulkanUseEntryPointName;  // also where there is only one
    options[2].value.intValue0 = 1;
    desc.compilerOptionEntries = options;
    desc.compilerOptionEntryCount = 3;
    slang::ISession *session = nullptr;
    if (SLANG_FAILED(global->createSession(desc, &session))) return fail("cannot start a session", nullptr);
    for (int a = 3; a < argc; a++) {
        ISlangBlob *log = nullptr;
        slang::IModule *module = session->loadModule(argv[a], &log);
        if (!module) return fail(argv[a], log);
        if (log) fprintf(stderr, "%s", (const char *)log->getBufferPointer());  // warnings
        if (compile(session, module, std::string(argv[2]) + "/" + argv[a] + ".spv")) return 1;
    }
}
