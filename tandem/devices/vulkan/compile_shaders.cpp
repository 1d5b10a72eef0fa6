// Compiles Slang modules to SPIR-V through Slang's COM interface: the wheel it comes from has no command for it.
// usage: compile_shaders FOLDER OUT MODULE...   every compute entry point becomes OUT/<its name>.spv and is printed.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include "slang.h"
#include "slang-deprecated.h"

static int fail(const char *what, ISlangBlob *log) {
    fprintf(stderr, "%s\n%s", what, log ? (const char *)log->getBufferPointer() : "");
    return 1;
}

static int compile(slang::ISession *session, slang::IModule *module, int index, const std::string &out) {
    slang::IEntryPoint *entry = nullptr;
    module->getDefinedEntryPoint(index, &entry);
    const std::string name = entry->getFunctionReflection()->getName();
    slang::IComponentType *parts[] = {module, entry}, *program = nullptr, *linked = nullptr;
    ISlangBlob *log = nullptr, *code = nullptr;
    if (SLANG_FAILED(session->createCompositeComponentType(parts, 2, &program, &log))) return fail(name.c_str(), log);
    if (SLANG_FAILED(program->link(&linked, &log))) return fail(name.c_str(), log);
    if (SLANG_FAILED(linked->getEntryPointCode(0, 0, &code, &log))) return fail(name.c_str(), log);
    std::ofstream file(out + "/" + name + ".spv", std::ios::binary);
    const auto *words = (const uint32_t *)code->getBufferPointer();
    file.write((const char *)words, 5 * sizeof *words);
    for (size_t at = 5; at < code->getBufferSize() / sizeof *words; at += words[at] >> 16) {
        // Without OpSource and OpName: smaller, and tools from before Slang refuse its number for a language.
        const uint32_t op = words[at] & 0xffff;
        if (op < 2 || op > 6) file.write((const char *)(words + at), (words[at] >> 16) * sizeof *words);
    }
    printf("%s\n", name.c_str());
    return file.good() ? 0 : fail("cannot write the output", nullptr);
}

int main(int argc, char **argv) {
    if (argc < 4) return fail("usage: compile_shaders FOLDER OUT MODULE...", nullptr);
    setenv("SLANG_RUN_SPIRV_VALIDATION", "1", 1);
    slang::IGlobalSession *global = nullptr;
    if (SLANG_FAILED(slang_createGlobalSession(SLANG_API_VERSION, &global))) return fail("cannot start Slang", nullptr);
    slang::TargetDesc target;
    target.format = SLANG_SPIRV;
    target.profile = global->findProfile("spirv_1_5");  // what Vulkan 1.2 takes
    target.flags = SLANG_TARGET_FLAG_GENERATE_SPIRV_DIRECTLY;
    slang::SessionDesc desc;
    desc.targets = &target;
    desc.targetCount = 1;
    desc.searchPaths = argv + 1;
    desc.searchPathCount = 1;
    slang::CompilerOptionEntry options[2];
    options[0].name = slang::CompilerOptionName::DisableWarning;  // a shader uses subgroups: all our devices have them
    options[0].value.kind = slang::CompilerOptionValueKind::String;
    options[0].value.stringValue0 = "41012";
    options[1].name = slang::CompilerOptionName::Optimization;
    options[1].value.intValue0 = SLANG_OPTIMIZATION_LEVEL_HIGH;
    desc.compilerOptionEntries = options;
    desc.compilerOptionEntryCount = 2;
    slang::ISession *session = nullptr;
    if (SLANG_FAILED(global->createSession(desc, &session))) return fail("cannot start a session", nullptr);
    for (int a = 3; a < argc; a++) {
        ISlangBlob *log = nullptr;
        slang::IModule *module = session->loadModule(argv[a], &log);
        if (!module) return fail(argv[a], log);
        if (log) fprintf(stderr, "%s", (const char *)log->getBufferPointer());  // warnings
        for (int i = 0; i < module->getDefinedEntryPointCount(); i++)
            if (compile(session, module, i, argv[2])) return 1;
    }
}
