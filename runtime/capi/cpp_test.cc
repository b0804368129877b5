// A C++ program that uses every class of gtrain/gtrain.h, as one rank by hand or as several under `gtrain
// launch`, and lets handles go in orders in which nobody should.
#include <gtrain/gtrain.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using namespace gtrain;  // NOLINT(google-build-using-namespace)

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: %s failed\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                    \
    }                                                                             \
  } while (0)

constexpr size_t kElements = 4096;

std::vector<float> Counting(size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), 1.0f);
  return values;
}

void TestStatus() {
  CHECK(Status().ok() && Status().exit_code() == 0 && Status().ToString() == "OK");
  const Status lost(StatusCode::kUnavailable, "rank 3 was lost");
  CHECK(lost.exit_code() == kExitRunMeAgain && lost.ToString() == "UNAVAILABLE: rank 3 was lost");
  const Result<int> none = lost;
  CHECK(!none.ok() && none.status().message() == "rank 3 was lost");
  try {
    (void)none.value();
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.status().code() == StatusCode::kUnavailable);
  }
  CHECK(Result<int>(7).value() == 7);
}

void TestCollectives(const Session& session, Communicator& comm) {
  const auto size = static_cast<size_t>(comm.size());
  const auto rank = static_cast<size_t>(comm.rank());
  std::vector<float> data(3, static_cast<float>(rank + 1));
  comm.AllReduce(data, ReduceOp::kMax).ThrowIfError();
  CHECK(data[2] == static_cast<float>(size));
  std::array<int64_t, 2> mine = {static_cast<int64_t>(rank), 7};
  std::vector<int64_t> all(2 * size);
  comm.AllGather(mine, all).ThrowIfError();
  CHECK(all[2 * rank] == static_cast<int64_t>(rank) && all.back() == 7);
  std::vector<int32_t> parts(size, 1);
  int32_t part = 0;
  comm.ReduceScatter(parts, std::span(&part, 1)).ThrowIfError();
  CHECK(part == comm.size());
  double loss = session.rank() == 0 ? 0.5 : 0;
  comm.Broadcast(std::span(&loss, 1)).ThrowIfError();
  CHECK(loss == 0.5);
  std::vector<uint8_t> from(size, static_cast<uint8_t>(rank)), to(size);
  comm.AllToAll(from, to).ThrowIfError();
  CHECK(to.back() == size - 1);
  comm.Reduce(std::span(&loss, 1), ReduceOp::kSum, 0).ThrowIfError();
  uint16_t bits = rank == 0 ? 5 : 8;
  comm.AllReduce(std::span(&bits, 1), ReduceOp::kBitOr).ThrowIfError();
  CHECK(bits == (size == 1 ? 5 : 13));
  CHECK(!comm.StopAgreed().value());
  Request request = comm.StartAllReduce(data, ReduceOp::kMean).value();
  request.Wait().ThrowIfError();
  CHECK(data[0] == static_cast<float>(size));
}

void TestWrongSizes(const Session& session) {
  Communicator comm = Communicator::Create(session).value();
  std::vector<int64_t> all(2 * static_cast<size_t>(comm.size()) + 1), mine(2);
  const Status status = comm.AllGather(mine, all);
  CHECK(status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kUnavailable);
}

// Objects made from a handle keep what they need of it.
void TestAnyOrder(const Session& joined, const std::string& folder) {
  std::optional<Communicator> comm = Communicator::Create(joined).value();
  std::optional<Communicator> part = comm->Split(0, comm->rank()).value();
  std::optional<Reducer> reducer = Reducer::Create(*comm, {{"w", kElements}}).value();
  std::vector<float> data(kElements, 1);
  std::optional<Request> request = comm->StartAllReduce(data).value();
  comm.reset();
  request->Wait().ThrowIfError();
  request.reset();
  part->Barrier().ThrowIfError();
  Checkpointer checkpointer = Checkpointer::Open(joined, {.uri = folder}).value();
  checkpointer.AddReplicated("data", data).ThrowIfError();
  checkpointer.AddReducer(*reducer).ThrowIfError();
  part.reset();
  reducer->Ready(0).ThrowIfError();
  (void)reducer->Finish().value();
  reducer.reset();
  checkpointer.Commit(1).ThrowIfError();
}

size_t Commits(const std::string& folder, const std::string& step) {
  size_t found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    found += entry.path().filename().string().starts_with(step) ? 1 : 0;
  return found;
}

void TestOneCommit(const Session& session, const std::string& folder) {
  std::vector<double> weights(kElements, 1);
  Checkpointer checkpointer = Checkpointer::Open(session, {.uri = folder, .every_steps = 2}).value();
  checkpointer.AddReplicated("weights", weights).ThrowIfError();
  CHECK(!checkpointer.Restore().value().has_value());
  CHECK(!checkpointer.SaveIfDue(1).value().saved);
  CHECK(checkpointer.SaveIfDue(2).value().saved);
  checkpointer.Commit(2).ThrowIfError();
  CHECK(checkpointer.Save(2).value());
  checkpointer.Wait(std::chrono::minutes(1)).ThrowIfError();
  CHECK(Commits(folder, "step-000000000002") == 1);
  checkpointer.Commit(3).ThrowIfError();
  CHECK(Commits(folder, "step-000000000003") == 1);
}

// The last state is committed although nobody fenced it: it does not change any more.
void TestLazyCommit(const Session& session, const std::string& folder) {
  std::vector<double> weights(kElements, 1);
  Checkpointer checkpointer =
      Checkpointer::Open(session, {.uri = folder, .every_steps = 2, .lazy = true}).value();
  checkpointer.AddReplicated("weights", weights).ThrowIfError();
  CHECK(checkpointer.SaveIfDue(2).value().saved);
  checkpointer.Commit(2).ThrowIfError();
  CHECK(Commits(folder, "step-000000000002") == 1);
  checkpointer.Commit(3).ThrowIfError();
  CHECK(checkpointer.LastCommitted() == 3);
}

// The step is the checkpoint's, and a program that has trained nothing since saves nothing.
void TestRestoredStep(const Session& session, const std::string& folder) {
  std::vector<double> weights(kElements);
  Checkpointer checkpointer = Checkpointer::Open(session, {.uri = folder, .every_steps = 2}).value();
  checkpointer.AddReplicated("weights", weights).ThrowIfError();
  const std::optional<RestoredStep> restored = checkpointer.Restore().value();
  CHECK(restored && restored->step == 3 && weights[0] == 1 && restored->bytes > 0);
  checkpointer.Commit(restored->step).ThrowIfError();
  CHECK(Commits(folder, "step-000000000003") == 1);
}

void TestFunctionsOfTheProgram(const Session& session, const std::string& folder) {
  std::string loader = "one";
  bool fails = false;
  CheckpointOptions options{.uri = folder};
  options.before_save = [&] {
    return fails ? Status(StatusCode::kDataLoss, "the accelerator is gone") : Status();
  };
  Checkpointer checkpointer = Checkpointer::Open(session, std::move(options)).value();
  checkpointer
      .AddBytes(
          "loader",
          [&]() -> Result<std::string> {
            if (loader.empty()) throw std::runtime_error("no loader");
            return loader;
          },
          [&](std::string_view text) {
            loader = text;
            return Status();
          })
      .ThrowIfError();
  checkpointer.Commit(1).ThrowIfError();
  loader.clear();
  const Status thrown = checkpointer.Save(2).status();
  CHECK(thrown.code() == StatusCode::kInternal && thrown.message().find("no loader") != std::string::npos);
  loader = "two";
  fails = true;
  const Status failed = checkpointer.Save(3).status();
  CHECK(failed.code() == StatusCode::kDataLoss && failed.message().find("accelerator") != std::string::npos);
  CHECK(checkpointer.Restore().value()->step == 1 && loader == "one");
}

// One step of gradients that differ from rank to rank, and what top-k made of them.
std::vector<float> ReducedGradient(Reducer& reducer, const Communicator& comm, float scale) {
  const std::span<float> gradient = reducer.gradient(0);
  for (size_t i = 0; i < gradient.size(); ++i)
    gradient[i] = scale * (static_cast<float>(comm.rank()) + 1.0f / static_cast<float>(i + 1));
  reducer.Ready(0).ThrowIfError();
  const ReducedStep step = reducer.Finish().value();
  CHECK(step.unused.empty() && step.selected.wanted > 0);
  return {gradient.begin(), gradient.end()};
}

// The residual of top-k is restored with the checkpoint, bit by bit.
void TestReducer(const Session& session, Communicator& comm, const std::string& folder) {
  ReducerOptions options{.compress_from = 1};
  options.compression = ParseCompression("topk density=0.01 warmup=0").value();
  CHECK(options.compression.codec == Codec::kTopK && options.compression.density == 0.01);
  CHECK(!ParseCompression("topk density=7").ok() && !ParseCompression("auto: fp16").ok());
  std::vector<float> expected, weights(kElements);
  for (const bool resumed : {false, true}) {
    Reducer reducer = Reducer::Create(comm, {{"w", kElements}}, options).value();
    CHECK(reducer.gradient(0).size() == kElements && reducer.gradient(1).empty());
    CHECK(reducer.Ready(9).code() == StatusCode::kInvalidArgument);
    Checkpointer checkpointer = Checkpointer::Open(session, {.uri = folder}).value();
    checkpointer.AddReplicated("weights", weights).ThrowIfError();
    checkpointer.AddReducer(reducer).ThrowIfError();
    CHECK(checkpointer.Restore().value().has_value() == resumed);
    if (!resumed) {
      (void)ReducedGradient(reducer, comm, 1);
      checkpointer.Commit(1).ThrowIfError();
      expected = ReducedGradient(reducer, comm, 2);
    } else {
      CHECK(ReducedGradient(reducer, comm, 2) == expected);
    }
    reducer.Drop();
  }
}

void TestCompressedMean(Communicator& comm) {
  CompressionOptions half;
  half.codec = Codec::kFloat16;
  CompressedMean mean = CompressedMean::Create(comm, half, kElements).value();
  std::vector<float> data = Counting(kElements);
  mean.AllReduce(data).ThrowIfError();
  CHECK(data[0] == 1 && data[1023] == 1024);  // float16 has them exactly
  mean.Drop();
  CHECK(comm.size() == 1 || mean.bytes_sent() > 0);
  half.density = -1;
  half.codec = Codec::kTopK;
  CHECK(CompressedMean::Create(comm, half, kElements).status().code() == StatusCode::kInvalidArgument);
}

void TestSharding(const Session& session, const std::string& folder) {
  const Sharding rows{.mesh = {{"dp", session.world_size()}}, .splits = {{0, "dp"}}};
  const std::vector<int64_t> shape = {8, 3};
  const LocalBox box = LocalBoxOf(shape, rows, session.rank()).value();
  std::vector<float> mine(static_cast<size_t>(box.shape[0] * box.shape[1]), 1);
  CHECK(LocalBoxOf(shape, rows, 99).status().code() == StatusCode::kInvalidArgument);
  Checkpointer checkpointer = Checkpointer::Open(session, {.uri = folder}).value();
  checkpointer.AddSharded("t", {mine.data(), mine.size() * sizeof(float)}, shape, rows, DType::kFloat32)
      .ThrowIfError();
  CHECK(checkpointer.AddSharded("u", {mine.data(), 1}, shape, rows, DType::kFloat32).code() ==
        StatusCode::kInvalidArgument);
  CHECK(checkpointer.AddPerRank("gpu", {mine.data(), 4, MemoryKind::kCuda}).code() ==
        StatusCode::kUnimplemented);
  checkpointer.Commit(1).ThrowIfError();
}

// With a lazy save the cursor moves on while its copy is made: what is saved is that of the step.
void TestSamples(const Session& session, const std::string& folder) {
  std::optional<Samples> data =
      Samples::Open(session, {.samples = 100, .epochs = 2, .global_batch = 30, .seed = 5}).value();
  std::vector<int64_t> third;
  {
    std::vector<double> weights(kElements, 1);
    Checkpointer checkpointer = Checkpointer::Open(session, {.uri = folder, .lazy = true}).value();
    checkpointer.AddReplicated("weights", weights).ThrowIfError();
    data->AddTo(checkpointer).ThrowIfError();
    CHECK(!checkpointer.Restore().value().has_value());
    (void)data->Next();
    (void)data->Next();
    CHECK(checkpointer.Save(data->step()).value());
    third = data->Next();
    checkpointer.Fence().ThrowIfError();
    data.reset();  // the checkpointer keeps what it needs
    checkpointer.Wait(std::chrono::minutes(1)).ThrowIfError();
  }
  Samples again =
      Samples::Open(session, {.samples = 100, .epochs = 2, .global_batch = 30, .seed = 5}).value();
  std::vector<double> weights(kElements);
  Checkpointer checkpointer = Checkpointer::Open(session, {.uri = folder}).value();
  checkpointer.AddReplicated("weights", weights).ThrowIfError();
  again.AddTo(checkpointer).ThrowIfError();
  CHECK(checkpointer.Restore().value()->step == 2);
  CHECK(again.step() == 2 && again.steps() == 8 && again.epoch() == 0 && again.offset() == 60 &&
        again.batch() == 30);
  CHECK(again.Peek(0) == third && again.Next() == third);
  while (!again.done()) (void)again.Next();
  CHECK(again.Next().empty() && again.epoch() == 2);
  CHECK(Samples::Open(session, {.samples = 0}).status().code() == StatusCode::kInvalidArgument);
}

// By hand: a program that says what the job file does not, and hears what it would of one that does.
void TestElastic(const std::string& folder) {
  const auto train = [&](CheckpointOptions checkpoint, std::vector<int64_t> shape) {
    std::vector<float> weights(kElements * 5);
    Elastic run(Session::Join({.stays = true}).value());
    run.Replicated("weights", std::span(weights), std::move(shape));
    run.Checkpoint(std::move(checkpoint));
    run.Compress(ParseCompression("topk density=0.1 warmup=1").value());
    ElasticGradients& gradients = run.Reduce({weights.size()});
    int64_t steps = 0;
    const Status status = run.Train(run.Samples({.samples = 8, .global_batch = 2}), [&](Step& step) {
      CHECK(step.steps() == 4 && run.residual().ok());
      std::ranges::copy(Counting(weights.size()), gradients[0].begin());
      const Status applied = step.Apply(gradients, 3, [&]() noexcept {
        for (size_t i = 0; i < weights.size(); ++i) weights[i] += gradients[0][i];
      });
      CHECK(applied.ok() && step.loss() == 1.5);
      CHECK((step.reduced().selected.wanted > 0) == (step.number() > 1));
      CHECK((run.residual().value().norm > 0) == (step.number() > 1) && run.residual().value().lost == 0);
      ++steps;
      return run.Evaluate(7, [](int64_t begin, int64_t end) { return static_cast<double>(end - begin); })
          .status();
    });
    if (status.ok()) CHECK(run.Evaluate(9, [](int64_t, int64_t end) { return 1.0 * end; }).value() == 9);
    return std::pair(status, steps);
  };
  using Outcome = std::pair<Status, int64_t>;
  const Outcome first = train({.uri = folder}, {5, kElements}),
                again = train({.uri = folder}, {5, kElements});
  CHECK(first.first.ok() && first.second == 4);
  CHECK(again.first.ok() && again.second == 0);  // all is trained, says its checkpoint
  CHECK(std::distance(std::filesystem::directory_iterator(folder + "/manifests"), {}) == 1);
  CHECK(train({.uri = folder}, {4, kElements}).first.code() == StatusCode::kInvalidArgument);
  CHECK(train({.uri = folder, .lazy = true}, {}).first.code() == StatusCode::kInvalidArgument);
  CHECK(train({.uri = folder, .before_save = [] { return Status(); }}, {}).first.code() ==
        StatusCode::kInvalidArgument);
}

// What rank 0 says where the job file's batch is not that of the program.
void TestBatchOfTheJobFile() {
  std::vector<std::string> said;
  SetLog([&](LogLevel level, std::string_view text) {
    if (level == LogLevel::kWarning) said.emplace_back(text);
  });
  setenv("GTRAIN_GLOBAL_BATCH", "40", 1);
  const auto train = [&](int64_t batch) {
    Elastic run(Session::Join({.stays = true}).value());
    ElasticGradients& gradients = run.Reduce({1});
    const auto data = run.Samples({.samples = 120, .global_batch = batch});
    int64_t largest = 0;
    const Status status = run.Train(data, [&](Step& step) {
      largest = std::max(largest, step.batch());
      return step.Apply(gradients, 0, []() noexcept {});
    });
    CHECK(status.ok());
    return largest;
  };
  CHECK(train(40) == 40 && train(0) == 40 && said.empty());
  CHECK(train(30) == 30 && said.size() == 1);
  CHECK(said[0].find("`elastic: {global_batch: 40}` and the program says 30: batches have 30 samples") !=
        std::string::npos);
  const Session session = Session::Join().value();
  CHECK(Samples::Open(session, {.name = "valid", .samples = 9, .global_batch = 3}).ok() && said.size() == 1);
  CHECK(Samples::Open(session, {.samples = 9, .global_batch = 3}).ok() && said.size() == 2);
  unsetenv("GTRAIN_GLOBAL_BATCH");
  SetLog({});
}

// `shared` is the folder that ranks share; without it the test makes one of its own.
int Run(const char* shared) {
  std::string folder = shared != nullptr ? shared : "cpp_test-XXXXXX";
  if (shared == nullptr) CHECK(mkdtemp(folder.data()) != nullptr);
  {
    TestStatus();
    if (shared == nullptr) TestBatchOfTheJobFile();
    std::optional<Session> session = Session::Join().value();
    CHECK(session->Alive().ok() && !session->StopRequested() && !session->PreemptionNotice());
    session->Report({.step = 1, .loss = 0.5, .samples = 2});
    Communicator comm = Communicator::Create(*session).value();
    CHECK(comm.timeout() == std::chrono::minutes(10));
    TestCollectives(*session, comm);
    TestWrongSizes(*session);
    TestOneCommit(*session, folder + "/one");
    TestRestoredStep(*session, folder + "/one");
    TestLazyCommit(*session, folder + "/lazy");
    TestFunctionsOfTheProgram(*session, folder + "/functions");
    TestReducer(*session, comm, folder + "/reducer");
    TestCompressedMean(comm);
    TestSharding(*session, folder + "/sharding");
    if (comm.size() == 1) TestSamples(*session, folder + "/samples");
    if (comm.size() == 1) TestElastic(folder + "/elastic");
    TestAnyOrder(*session, folder + "/order");
    session.reset();  // before the communicator that was made of it
    comm.Barrier().ThrowIfError();
    std::vector<float> data(kElements, 1);
    comm.AllReduce(data).ThrowIfError();
    CHECK(data[0] == static_cast<float>(comm.size()));
    std::printf("ok on rank %d of %d\n", comm.rank(), comm.size());
  }
  if (shared == nullptr) std::filesystem::remove_all(folder);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run(argc > 1 ? argv[1] : nullptr);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return error.status().exit_code();
  }
}
