"""gtrain_library and gtrain_test: one library and one test program a folder, as cmake/gtrain.cmake has them."""

_COPTS = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]

# As in CMake any folder may include any header of the tree; tools/layers.txt says which ones it should.
_HEADERS = ["base", "job", "net", "launcher", "runtime/core", "runtime/port", "comm", "checkpoint", "sharding", "topology", "include"]

def gtrain_headers(name):
    native.cc_library(
        name = name,
        hdrs = native.glob([folder + "/**/*.h" for folder in _HEADERS], allow_empty = True),
        includes = ["include"],
    )

def gtrain_library(name, folder, srcs = [], deps = [], **kwargs):
    native.cc_library(
        name = name,
        srcs = [folder + "/" + src for src in srcs],
        deps = deps + [":headers", "@absl"],
        copts = _COPTS,
        linkstatic = True,
        **kwargs
    )

def gtrain_test(name, folder, srcs, deps = [], **kwargs):
    native.cc_test(
        name = name,
        srcs = [folder + "/" + src for src in srcs],
        deps = deps + [":headers", "@absl", "@gtest//:gtest_main"],
        copts = _COPTS,
        env = {"GTRAIN_SOURCE_DIR": "."},
        size = "small",
        **kwargs
    )
