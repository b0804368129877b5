"""gtrain_library and gtrain_test: one library and one test program a folder, as cmake/gtrain.cmake has them."""

_COPTS = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-I."]

def gtrain_library(name, folder, srcs = [], deps = [], **kwargs):
    native.cc_library(
        name = name,
        srcs = [folder + "/" + src for src in srcs],
        hdrs = native.glob([folder + "/*.h"], allow_empty = True),
        deps = deps + ["@absl"],
        copts = _COPTS,
        linkstatic = True,
        **kwargs
    )

def gtrain_test(name, folder, srcs, deps = [], **kwargs):
    native.cc_test(
        name = name,
        srcs = [folder + "/" + src for src in srcs],
        deps = deps + ["@absl", "@gtest//:gtest_main"],
        copts = _COPTS,
        size = "small",
        **kwargs
    )
