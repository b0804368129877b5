// The module itself, in a child, because UCX stays in the process that loads it.
#include "base/module.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "absl/strings/match.h"
#include "comm/ucx/ucx_abi.h"
#include "comm/ucx/ucx_test_here.h"

namespace gtrain::comm {
namespace {

// The error of opening a worker; empty if it worked.
std::string Opened(const GtrainUcxApi* api, const char* transports, const char* devices, int every) {
  GtrainUcxError error{};
  GtrainUcxWorker* worker = api->open(
      transports, devices, every, [](void*, const void*, size_t) {}, nullptr, &error);
  if (worker != nullptr) api->close(worker, 0);
  std::fprintf(stderr, "%s on %s: %s\n", transports, devices, worker != nullptr ? "open" : error.text);
  return worker != nullptr ? "" : error.text;
}

// Number of the first thing that is wrong.
int Child() {
  // Is meant for other libraries of a rank (MPI): gtrain tells its own UCX which devices it takes.
  setenv("UCX_NET_DEVICES", "none_1:1", 1);
  const auto module = LoadModule("libgtrain_comm_ucx.so", "GTRAIN_COMM_UCX", "this test needs");
  if (!module.ok()) return 1;
  const auto entry = ModuleEntry(*module, GTRAIN_UCX_ENTRY, "libgtrain_comm_ucx.so");
  if (!entry.ok()) return 2;
  const GtrainUcxApi* api = reinterpret_cast<const GtrainUcxApi* (*)()>(*entry)();
  // These are the settings of a machine with RDMA, where its device cannot be used.
  if (!Opened(api, "rc,ud,dc,tcp", "none_0:1,lo", 0).empty()) return 3;
  const std::string missing = Opened(api, "rc,tcp", "none_0:1,lo", 1);
  if (!absl::StartsWith(missing, "no rc on none_0:1,lo; UCX finds here: ")) return 4;
  if (!absl::StrContains(missing, "tcp on lo")) return 5;
  if (!Opened(api, "tcp", "lo", 1).empty()) return 6;
  if (!absl::StartsWith(Opened(api, "tcp,cma", "lo", 1), "no cma on lo;")) return 7;
  if (Opened(api, "tcp", "none0", 0).empty()) return 8;
  return 0;
}

TEST(UcxModule, UsesWhatIsThereOrSaysWhatIsMissing) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  const pid_t pid = fork();
  if (pid == 0) _exit(Child());
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace gtrain::comm
