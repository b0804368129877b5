# Everything the folders' CMakeLists.txt need: options, dependencies, and the
# functions that declare a library, a program and a test.
include_guard()
include(GNUInstallDirs)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)

option(GTRAIN_FUZZ "Build the libFuzzer targets of tests/fuzz (needs clang)" OFF)
set(GTRAIN_SANITIZE "" CACHE STRING "Sanitizers to build with: empty, 'address,undefined' or 'thread'")
# `make check` configures once with this on: it proves that base and the PURE folders need no adapter's library.
option(GTRAIN_PURE_ONLY "Look for no optional dependency and build base and the PURE folders only" OFF)

# All presets but `dev` have eight: headers are read once for that many files, a clean build takes three fifths of the CPU time, and
# one edited file several times its own (tools/README.md, "Compiling in batches").
set(GTRAIN_UNITY 0 CACHE STRING "Files of a target that are compiled as one; 0: each alone")
# A program takes whole objects out of a library, and one of a batch brings more than was asked for: the linker drops what nothing
# reaches, so that a rank starts with the pages and libraries that it needs.
if(GTRAIN_UNITY AND NOT GTRAIN_SANITIZE)
  add_compile_options(-ffunction-sections -fdata-sections)
  add_link_options(-Wl,--gc-sections)
endif()

# Assertions stay on in every build type: NDEBUG is never defined.
# -g1: backtraces, lines and profiles, without types and variables, for which `cmake --preset dev` is there. A seventh of the
# time of compiling.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O2 -g1")
set(CMAKE_CXX_FLAGS_DEBUG "-O0 -g")
set(CMAKE_C_FLAGS_DEBUG "-O0 -g")
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()

find_program(GTRAIN_CCACHE ccache)
if(GTRAIN_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${GTRAIN_CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${GTRAIN_CCACHE})
endif()
find_program(GTRAIN_LLD ld.lld)
if(GTRAIN_LLD)
  add_link_options(-fuse-ld=lld)
endif()
add_link_options(-Wl,--as-needed)

# gcc takes a sixth of its time to find out where each variable lives in optimised code (lines, types and backtraces stay), and a
# fifteenth to collect its garbage before it has 512 MiB.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options(-fno-var-tracking --param=ggc-min-heapsize=524288)
endif()
# What a failed check prints is a path in the tree. A batch names its files by their full paths, which would keep ccache from
# serving one checkout with what it has of another.
add_compile_options(-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=)
add_compile_options(-Wall -Wextra -Werror -Wno-missing-field-initializers -fno-omit-frame-pointer)
if(GTRAIN_SANITIZE)
  # A third less compile time than -O2 -g (runtime/core/agent/agent_core.cc: 9.5 s of CPU instead of 15.5 s); reports still
  # name file and line.
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1")
  set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O1 -g1")
  # gcc's flow analysis is wrong about instrumented code (std::regex), so that one warning stays with the other builds.
  add_compile_options(-fsanitize=${GTRAIN_SANITIZE} -fno-sanitize-recover=all)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-Wno-maybe-uninitialized)
  endif()
  add_link_options(-fsanitize=${GTRAIN_SANITIZE})
else()
  add_compile_options(-fstack-protector-strong)
  if(NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
    add_compile_options(-D_FORTIFY_SOURCE=2)
  endif()
endif()

if(GTRAIN_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "GTRAIN_FUZZ needs clang: cmake --preset fuzz")
  endif()
  # Coverage in all of our code; only the targets themselves link libFuzzer's main(). Warnings are gcc's business.
  add_compile_options(-fsanitize=fuzzer-no-link -w)
endif()

find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
set(GTRAIN_SUMMARY "" CACHE INTERNAL "")

# gtrain_record(<what> <found or empty> <what happens without it>)
function(gtrain_record what value without)
  if(value)
    string(REPLACE ";" " " value "${value}")
    set(line "${what}|found ${value}")
  else()
    set(line "${what}|NOT FOUND: ${without}")
  endif()
  set(GTRAIN_SUMMARY "${GTRAIN_SUMMARY};${line}" CACHE INTERNAL "")
endfunction()

# gtrain_pkg(<target suffix> <pkg-config module> REQUIRED|OPTIONAL <what is lost without it>)
# makes gtrain_dep_<suffix> and GTRAIN_HAVE_<SUFFIX>.
function(gtrain_pkg suffix module need without)
  pkg_check_modules(PC_${suffix} IMPORTED_TARGET GLOBAL ${module})
  string(TOUPPER ${suffix} upper)
  if(PC_${suffix}_FOUND)
    add_library(gtrain_dep_${suffix} INTERFACE)
    target_link_libraries(gtrain_dep_${suffix} INTERFACE PkgConfig::PC_${suffix})
    set(GTRAIN_HAVE_${upper} TRUE CACHE INTERNAL "")
  else()
    set(GTRAIN_HAVE_${upper} FALSE CACHE INTERNAL "")
  endif()
  gtrain_record("${module}" "${PC_${suffix}_VERSION}" "${without}")
endfunction()

# abseil: executables link it statically (a rank starts with fewer libraries to load); shared objects
# must use the shared one because Debian's archives are not PIC.
file(GLOB GTRAIN_ABSL_ARCHIVES /usr/lib/*/libabsl_*.a /usr/lib/libabsl_*.a /usr/local/lib/libabsl_*.a)
find_package(absl REQUIRED)
set(GTRAIN_ABSL_SHARED
  absl::status absl::statusor absl::strings absl::str_format absl::time absl::flat_hash_map
  absl::flat_hash_set absl::synchronization absl::btree absl::hash absl::span absl::cleanup)
add_library(gtrain_absl INTERFACE)
if(GTRAIN_ABSL_ARCHIVES AND NOT GTRAIN_SANITIZE MATCHES "thread")
  set(GTRAIN_ABSL_STATIC -Wl,--start-group ${GTRAIN_ABSL_ARCHIVES} -Wl,--end-group)
  foreach(lib ${GTRAIN_ABSL_SHARED})
    foreach(type SHARED_LIBRARY MODULE_LIBRARY)
      set(shared_choice ${shared_choice} $<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,${type}>:${lib}>)
    endforeach()
  endforeach()
  foreach(lib ${GTRAIN_ABSL_STATIC})
    set(static_choice ${static_choice} $<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:${lib}>)
  endforeach()
  target_link_libraries(gtrain_absl INTERFACE ${shared_choice} ${static_choice} Threads::Threads)
  gtrain_record(abseil "${absl_VERSION} (static in programs)" "")
else()
  target_link_libraries(gtrain_absl INTERFACE ${GTRAIN_ABSL_SHARED} Threads::Threads)
  gtrain_record(abseil "${absl_VERSION} (shared)" "")
endif()

find_package(GTest REQUIRED)
gtrain_record(googletest "${GTest_VERSION}" "")
gtrain_pkg(re2 re2 REQUIRED "")
if(NOT GTRAIN_HAVE_RE2)
  message(FATAL_ERROR "gtrain: re2 is missing: run tools/install.sh")
endif()
gtrain_pkg(yaml yaml-cpp OPTIONAL "no job files")
find_package(nlohmann_json QUIET)
gtrain_record(nlohmann_json "${nlohmann_json_VERSION}" "no JSON output")
gtrain_pkg(xxhash libxxhash OPTIONAL "no checkpoints")
gtrain_pkg(hwy libhwy OPTIONAL "scalar codecs only")

if(NOT GTRAIN_PURE_ONLY)
find_package(benchmark QUIET)
gtrain_record(benchmark "${benchmark_VERSION}" "no bench/ micro-benchmarks")
gtrain_pkg(zmq libzmq OPTIONAL "no head, agent or launcher")
gtrain_pkg(sodium libsodium OPTIONAL "no head, agent or launcher")
gtrain_pkg(zstd libzstd OPTIONAL "no head, agent or launcher")
find_package(CapnProto QUIET)
gtrain_record(capnproto "${CapnProto_VERSION}" "no head, agent or launcher")
find_package(RocksDB QUIET)
gtrain_record(rocksdb "${RocksDB_VERSION}" "no head")
gtrain_pkg(hwloc hwloc OPTIONAL "topology from sysfs only")
gtrain_pkg(curl libcurl OPTIONAL "no S3")
gtrain_pkg(crypto libcrypto OPTIONAL "no S3")
gtrain_pkg(expat expat OPTIONAL "no S3")
gtrain_pkg(isal libisal OPTIONAL "uploads to S3 are always signed with their SHA-256")
gtrain_pkg(microhttpd libmicrohttpd OPTIONAL "the tests of S3 and bench_checkpoint are left out")
gtrain_pkg(ucx ucx OPTIONAL "one machine only")
find_path(GTRAIN_MSGPACK msgpack.hpp)
gtrain_record(msgpack-cxx "${GTRAIN_MSGPACK}" "no libgtrain.so")
# TorchConfig warns loudly about missing optional parts; only what is printed in our table matters. Under a
# sanitizer libtorch, which is not instrumented, would only add noise.
if(NOT GTRAIN_SANITIZE)
  find_package(Torch QUIET)
endif()
gtrain_record(libtorch "${Torch_VERSION}" "examples/fashion_mnist is not built")
endif()

# gtrain_batches(<target> <source> ...): compiles them in batches where GTRAIN_UNITY says so. Files of one target must share no
# names, then; -DGTRAIN_UNITY=1000 finds out. Those of comm/exec and comm/ucx do share some.
function(gtrain_batches name)
  if(GTRAIN_UNITY AND ARGC GREATER 2 AND NOT name MATCHES "^gtrain_comm_(exec|ucx)$")
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${GTRAIN_UNITY})
  endif()
endfunction()

# gtrain_library(<name> [PURE] [SRCS ...] [DEPS ...] [LIBS ...])
# One library a folder. PURE: no threads, sockets, files, clocks, env; `make check`
# links each PURE target alone and looks for forbidden libraries.
function(gtrain_library name)
  cmake_parse_arguments(ARG "PURE" "" "SRCS;DEPS;LIBS" ${ARGN})
  add_library(${name} STATIC ${ARG_SRCS})
  gtrain_batches(${name} ${ARG_SRCS})
  target_include_directories(${name} PUBLIC ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/include)
  target_link_libraries(${name} PUBLIC ${ARG_DEPS} gtrain_absl PRIVATE ${ARG_LIBS})
  if(ARG_PURE)
    set_property(GLOBAL APPEND PROPERTY GTRAIN_PURE_TARGETS ${name})
  endif()
endfunction()

# Seconds after which a test is ended, 240 where none are given; more where sanitizers slow everything down.
function(gtrain_test_timeout variable)
  set(seconds 240)
  if(${variable})
    set(seconds ${${variable}})
  endif()
  if(GTRAIN_SANITIZE)
    math(EXPR seconds "5 * ${seconds}")
  endif()
  set(${variable} ${seconds} PARENT_SCOPE)
endfunction()

# Seconds of the tests that take longest, on a busy machine of two cores. They begin first, so that none of them runs alone at the end.
set(GTRAIN_LONG_TESTS e2e_examples_test=465 e2e_elastic_test=440 checkpoint_crash_test=310 comm_exec_test=280
  e2e_interactive_test=200 e2e_tiers_test=190 e2e_network_test=180 e2e_mesh_test=170 e2e_chaos_test=165
  e2e_install_test=145 comm_many_ranks_test=140 e2e_actors_test=125 e2e_exec_and_stack_test=125 checkpoint_engine_test=120 e2e_links_test=115
  e2e_bitwise_test=105 runtime_head_test=100 runtime_host_test=100 sim_test=97)
function(gtrain_test_cost name)
  foreach(long ${GTRAIN_LONG_TESTS})
    if(long MATCHES "^${name}=(.*)$")
      set_tests_properties(${name} PROPERTIES COST ${CMAKE_MATCH_1})
    endif()
  endforeach()
endfunction()

# gtrain_test(<name> SRCS ... DEPS ... [LIBS ...] [LABELS ...] [TIMEOUT s] [PURE] [SERIAL] [BATCH] [OPTIMIZED])
# One test program a folder. It runs with the repository root as working directory. BATCH: its files share no names, so that
# GTRAIN_UNITY may compile them together. OPTIMIZED: the test itself computes much, or has code of public headers that must be fast;
# the others are compiled without optimisation, three fifths of the time, against libraries that are as they ship.
function(gtrain_test name)
  cmake_parse_arguments(ARG "PURE;SERIAL;BATCH;OPTIMIZED" "TIMEOUT" "SRCS;DEPS;LIBS;LABELS" ${ARGN})
  gtrain_test_timeout(ARG_TIMEOUT)
  add_executable(${name} ${ARG_SRCS})
  if(ARG_BATCH)
    gtrain_batches(${name} ${ARG_SRCS})
  endif()
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/include)
  if(GTRAIN_SANITIZE MATCHES "undefined")
    # A look at each pointer before each use is a third of a test's compile time. What the tests test keeps it.
    target_compile_options(${name} PRIVATE -fno-sanitize=null,alignment)
  endif()
  if(NOT ARG_OPTIMIZED)
    target_compile_options(${name} PRIVATE -O0 -U_FORTIFY_SOURCE)
  endif()
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} ${ARG_LIBS} gtrain_absl GTest::gmock GTest::gtest_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
    ENVIRONMENT "GTRAIN_BUILD_DIR=${CMAKE_BINARY_DIR};GTRAIN_SOURCE_DIR=${CMAKE_SOURCE_DIR}")
  gtrain_test_cost(${name})
  if(ARG_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
  if(ARG_PURE)
    set_property(GLOBAL APPEND PROPERTY GTRAIN_PURE_TESTS ${name})
  endif()
endfunction()

# gtrain_python_test(<name> <file> [TIMEOUT s] [LABELS ...] [SERIAL]): a unittest file, run with Debian's own Python
# (its torch and numpy), not with whichever comes first in PATH.
find_program(GTRAIN_PYTHON python3 PATHS /usr/bin NO_DEFAULT_PATH)
function(gtrain_python_test name file)
  cmake_parse_arguments(ARG "SERIAL" "TIMEOUT" "LABELS" ${ARGN})
  gtrain_test_timeout(ARG_TIMEOUT)
  get_filename_component(path ${file} ABSOLUTE BASE_DIR ${CMAKE_CURRENT_SOURCE_DIR})
  add_test(NAME ${name} COMMAND ${GTRAIN_PYTHON} -B ${path} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
    ENVIRONMENT "GTRAIN_BUILD_DIR=${CMAKE_BINARY_DIR};GTRAIN_SOURCE_DIR=${CMAKE_SOURCE_DIR}")
  gtrain_test_cost(${name})
  if(ARG_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
endfunction()

# GTRAIN_PYTHON_HAS_torch, GTRAIN_PYTHON_HAS_numpy: what that Python can import.
foreach(module torch numpy)
  if(GTRAIN_PYTHON AND NOT DEFINED GTRAIN_PYTHON_HAS_${module})
    execute_process(COMMAND ${GTRAIN_PYTHON} -c
                      "import importlib.util as u, sys; sys.exit(u.find_spec('${module}') is None)"
                    RESULT_VARIABLE absent OUTPUT_QUIET ERROR_QUIET)
    if(absent EQUAL 0)
      set(GTRAIN_PYTHON_HAS_${module} TRUE CACHE INTERNAL "")
    endif()
  endif()
  gtrain_record("python3-${module}" "${GTRAIN_PYTHON_HAS_${module}}" "its Python examples are not tested")
endforeach()

# gtrain_program(<name> SRCS ... DEPS ... [LIBS ...] [FOLDER bin|examples])
function(gtrain_program name)
  cmake_parse_arguments(ARG "" "FOLDER" "SRCS;DEPS;LIBS" ${ARGN})
  if(NOT ARG_FOLDER)
    set(ARG_FOLDER bin)
  endif()
  add_executable(${name} ${ARG_SRCS})
  gtrain_batches(${name} ${ARG_SRCS})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/include)
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} ${ARG_LIBS} gtrain_absl)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/${ARG_FOLDER})
endfunction()

# A library or test of a dependency that was not found is left out with a word about it.
function(gtrain_needs out)
  set(ok TRUE)
  foreach(cond ${ARGN})
    if(NOT ${cond})
      set(ok FALSE)
      message(STATUS "gtrain: ${CMAKE_CURRENT_SOURCE_DIR} left out: ${cond} is not there")
    endif()
  endforeach()
  set(${out} ${ok} PARENT_SCOPE)
endfunction()

function(gtrain_print_summary)
  message(STATUS "gtrain: what was found")
  foreach(line ${GTRAIN_SUMMARY})
    string(REPLACE "|" ";" cells "${line}")
    list(GET cells 0 what)
    list(GET cells 1 state)
    string(LENGTH "${what}" length)
    math(EXPR pad "16 - ${length}")
    if(pad LESS 1)
      set(pad 1)
    endif()
    string(REPEAT " " ${pad} spaces)
    message(STATUS "  ${what}${spaces}${state}")
  endforeach()
  get_property(pure GLOBAL PROPERTY GTRAIN_PURE_TARGETS)
  get_property(pure_tests GLOBAL PROPERTY GTRAIN_PURE_TESTS)
  file(WRITE ${CMAKE_BINARY_DIR}/pure_targets.txt "${pure}\n${pure_tests}\n")
endfunction()
