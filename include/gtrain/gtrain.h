// gtrain for C++20 programs: header-only over the C interface of libgtrain.so (gtrain/gtrain_c.h).
//   find_package(gtrain REQUIRED)            # CMake
//   target_link_libraries(train gtrain::gtrain)
//   g++ -std=c++20 train.cc $(pkg-config --cflags --libs gtrain)
#pragma once
#include <gtrain/actor.h>
#include <gtrain/checkpoint.h>
#include <gtrain/communicator.h>
#include <gtrain/elastic.h>
#include <gtrain/reducer.h>
#include <gtrain/samples.h>
#include <gtrain/session.h>
#include <gtrain/status.h>
