// The S3 store against a server that misbehaves on demand: the S rows of the fault catalogue, B11 and B12.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "checkpoint/port/blob_store_test_suite.h"
#include "checkpoint/s3/crc32c.h"
#include "checkpoint/s3/credentials.h"
#include "checkpoint/s3/s3_fake.h"
#include "checkpoint/s3/s3_store.h"
#include "checkpoint/s3/sigv4.h"
#include "checkpoint/s3/xml.h"
#include "checkpoint/store/open_store.h"
#include "checkpoint/store/probe.h"
#include "net/http/curl_client.h"

namespace gtrain::ckpt {
namespace {

using testing::HasSubstr;

class FixedCredentials final : public CredentialsProvider {
 public:
  explicit FixedCredentials(S3Credentials credentials) : credentials_(std::move(credentials)) {}
  absl::StatusOr<S3Credentials> Get() override { return credentials_; }
  void Refused(const S3Credentials&) override {
    ++refused;
    credentials_.session_token.clear();  // "renewed"
  }
  int refused = 0;

 private:
  S3Credentials credentials_;
};

// A server, a client, and a store between them.
struct World {
  explicit World(S3Fake::Settings settings = {}, S3Options options = {},
                 S3Credentials with = {"AKIDEXAMPLE", "secret"},
                 std::shared_ptr<http::Client> http = *http::MakeCurlClient(""))
      : fake(std::make_unique<S3Fake>(std::move(settings))),
        credentials(std::make_shared<FixedCredentials>(std::move(with))) {
    if (options.bucket.empty()) options.bucket = "bucket";
    options.prefix = "run/ckpt";
    options.endpoint = fake->endpoint();
    options.path_style = true;
    options.first_backoff = absl::Milliseconds(1);
    options.part_bytes = 5 << 20;
    store = *OpenS3Store(options, std::move(http), credentials);
  }
  std::unique_ptr<S3Fake> fake;
  std::shared_ptr<FixedCredentials> credentials;
  std::unique_ptr<port::BlobStore> store;
};

// A store that brings its server along, for the conformance suite.
class WithServer final : public port::BlobStore {
 public:
  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override {
    return world_.store->PutIfAbsent(key, parts);
  }
  absl::Status PutStream(absl::string_view key, uint64_t bytes, Source source) override {
    return world_.store->PutStream(key, bytes, source);
  }
  uint64_t BytesMax() const override { return world_.store->BytesMax(); }
  absl::StatusOr<absl::Duration> Unchanged(absl::string_view name) override {
    return world_.store->Unchanged(name);
  }
  absl::StatusOr<std::string> Get(absl::string_view key, size_t max) override {
    return world_.store->Get(key, max);
  }
  absl::Status Read(absl::string_view key, uint64_t at, absl::Span<char> out) override {
    return world_.store->Read(key, at, out);
  }
  absl::StatusOr<uint64_t> Size(absl::string_view key) override { return world_.store->Size(key); }
  absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) override {
    return world_.store->List(prefix);
  }
  absl::StatusOr<std::vector<std::string>> ListFolders() override { return world_.store->ListFolders(); }
  absl::Status Delete(absl::string_view key) override { return world_.store->Delete(key); }
  absl::Status DeleteAll(absl::Span<const std::string> keys) override {
    return world_.store->DeleteAll(keys);
  }
  absl::Status DropEmptyFolder(absl::string_view folder) override {
    return world_.store->DropEmptyFolder(folder);
  }
  absl::StatusOr<std::vector<Unfinished>> ListUnfinished() override { return world_.store->ListUnfinished(); }
  absl::Status DropUnfinished(const Unfinished& u) override { return world_.store->DropUnfinished(u); }
  std::string Describe() const override { return world_.store->Describe(); }

 private:
  World world_;
};

std::string Large(size_t bytes = 12 << 20) {
  std::string large(bytes, '\0');
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 2654435761u >> 13);
  return large;
}

}  // namespace

// The fake, and a real server where one is named: $GTRAIN_TEST_S3_URI (tests/s3/rgw_test.py), with keys and
// endpoint as users give them.
std::vector<BlobStoreCandidate> Candidates() {
  std::vector<BlobStoreCandidate> candidates = {{"Fake", [] { return std::make_unique<WithServer>(); }}};
  if (const char* uri = std::getenv("GTRAIN_TEST_S3_URI"); uri != nullptr) {
    candidates.push_back({"Real", [uri] {
                            static int count = 0;
                            return *OpenStore(absl::StrCat(uri, "/", getpid(), "-", ++count));
                          }});
  }
  return candidates;
}
INSTANTIATE_TEST_SUITE_P(S3, BlobStoreConformance, testing::ValuesIn(Candidates()),
                         [](const auto& info) { return info.param.name; });

// Tests what the conformance suite does not reach: parts, and their remains.
TEST(RealS3, LargeBlobsGoInParts) {
  const char* uri = std::getenv("GTRAIN_TEST_S3_URI");
  if (uri == nullptr) GTEST_SKIP() << "GTRAIN_TEST_S3_URI names no server";
  auto store = *OpenStore(absl::StrCat(uri, "/", getpid(), "-large"));
  const std::string large = Large(40 << 20);
  ASSERT_EQ(ProveExclusive(store.get(), "probe"), absl::OkStatus());
  ASSERT_EQ(store->PutIfAbsent("step/shard", large), absl::OkStatus());
  EXPECT_EQ(*store->Get("step/shard", large.size()), large);
  EXPECT_TRUE(absl::IsAlreadyExists(store->PutIfAbsent("step/shard", large)));
  const auto stream = [&](uint64_t at) -> absl::StatusOr<absl::string_view> {
    return absl::string_view(large).substr(at, 3 << 20);
  };
  ASSERT_EQ(store->PutStream("step/stream", large.size(), stream), absl::OkStatus());
  EXPECT_TRUE(*store->Get("step/stream", large.size()) == large);
  EXPECT_TRUE(absl::IsAlreadyExists(store->PutStream("step/stream", large.size(), stream)));
  EXPECT_THAT(*store->ListUnfinished(), IsEmpty());
}

namespace {

TEST(SigV4, SignsTheExampleOfTheManual) {
  // Amazon S3 API reference, "Signature calculations for the Authorization header", GET object with a range.
  SignedRequest request;
  request.method = "GET";
  request.host = "examplebucket.s3.amazonaws.com";
  request.path = "/test.txt";
  request.headers["range"] = "bytes=0-9";
  const absl::Time when = absl::FromCivil(absl::CivilSecond(2013, 5, 24), absl::UTCTimeZone());
  const auto headers = Sign(request, {"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"},
                            "us-east-1", Sha256Hex({}), when);
  EXPECT_THAT(headers.at("authorization"),
              HasSubstr("Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"));
}

TEST(S3Store, LargeBlobsGoInPartsAndComeBack) {
  World world;
  const std::string large = Large();
  const absl::string_view parts[] = {absl::string_view(large).substr(0, 1000),
                                     absl::string_view(large).substr(1000)};
  ASSERT_EQ(world.store->PutIfAbsent("step/shard", parts), absl::OkStatus());
  EXPECT_EQ(*world.store->Get("step/shard", large.size()), large);
  EXPECT_EQ(absl::c_count(world.fake->Operations(), "Part"), 3);
  EXPECT_EQ(world.fake->OpenUploads(), 0u);
  EXPECT_TRUE(absl::IsAlreadyExists(world.store->PutIfAbsent("step/shard", parts)));
  EXPECT_EQ(world.fake->OpenUploads(), 0u);  // the refused one was aborted (S8)
}

TEST(S3Store, ManyAreDeletedByOneRequestWhereTheStoreCan) {
  const auto delete_three = [](World* world) {
    const std::vector<std::string> keys = {"f/1", "f/2", "f/3"};
    for (const std::string& key : keys) ASSERT_EQ(world->store->PutIfAbsent(key, "x"), absl::OkStatus());
    EXPECT_EQ(world->store->DeleteAll(keys), absl::OkStatus());
    EXPECT_THAT(*world->store->List("f/"), IsEmpty());
  };
  World world;
  delete_three(&world);
  EXPECT_EQ(absl::c_count(world.fake->Operations(), "DeleteMany"), 1);
  EXPECT_EQ(absl::c_count(world.fake->Operations(), "DeleteObject"), 0);
  for (const auto& [status, code] :
       {std::pair(501, "NotImplemented"), {400, "MissingContentMD5"}, {405, "No"}}) {
    S3Fake::Settings settings;
    settings.before = [status, code](const S3FakeRequest& request, S3FakeReply* reply) {
      if (request.Operation() == "DeleteMany") *reply = S3Error(status, code);
      return request.Operation() == "DeleteMany";
    };
    World old(settings);
    delete_three(&old);
    delete_three(&old);
    EXPECT_EQ(absl::c_count(old.fake->Operations(), "DeleteMany"), 1);  // and not asked again
    EXPECT_EQ(absl::c_count(old.fake->Operations(), "DeleteObject"), 6);
  }
}

// The answer is a 200, whatever became of each key.
TEST(S3Store, AKeyThatIsNotDeletedWithTheOthersIsAnError) {
  S3Fake::Settings settings;
  settings.before = [](const S3FakeRequest& request, S3FakeReply* reply) {
    if (request.Operation() == "DeleteMany") {
      *reply = {
          200, {}, "<DeleteResult><Error><Key>f/2</Key><Code>AccessDenied</Code></Error></DeleteResult>"};
      return true;
    }
    if (request.Operation() != "DeleteObject" || !absl::EndsWith(request.path, "f/2")) return false;
    *reply = S3Error(403, "AccessDenied");
    return true;
  };
  World world(settings);
  for (const char* key : {"f/1", "f/2"}) ASSERT_EQ(world.store->PutIfAbsent(key, "x"), absl::OkStatus());
  EXPECT_TRUE(absl::IsPermissionDenied(world.store->DeleteAll({"f/1", "f/2"})));
}

TEST(S3Store, ThrottlingIsWaitedOut_S1) {
  for (const char* operation : {"PutObject", "GetObject", "HeadObject", "List", "DeleteObject", "Create",
                                "Part", "Complete", "Uploads"}) {
    for (const auto& [status, code] :
         {std::pair(503, "SlowDown"), {500, "InternalError"}, {429, "TooManyRequests"}}) {
      std::atomic<int> left{3};
      S3Fake::Settings settings;
      settings.before = [&, status = status, code = code](const S3FakeRequest& request, S3FakeReply* reply) {
        if (request.Operation() != operation || left-- <= 0) return false;
        *reply = S3Error(status, code);
        return true;
      };
      World world(settings);
      const bool large = absl::StartsWith(operation, "C") || absl::StartsWith(operation, "Pa");
      const std::string data = large ? Large() : "small";
      EXPECT_EQ(world.store->PutIfAbsent("k", data), absl::OkStatus()) << operation;
      EXPECT_EQ(*world.store->Get("k", data.size()), data) << operation;
      EXPECT_EQ(*world.store->Size("k"), data.size()) << operation;
      EXPECT_THAT(*world.store->List(""), ElementsAre("k"));
      EXPECT_THAT(*world.store->ListUnfinished(), IsEmpty());
      EXPECT_EQ(world.store->Delete("k"), absl::OkStatus());
      EXPECT_LE(left, 0) << operation;  // it did happen
    }
  }
}

TEST(S3Store, AStoreThatRefusesForEverIsGivenUp_S1) {
  S3Fake::Settings settings;
  settings.before = [](const S3FakeRequest&, S3FakeReply* reply) {
    return *reply = S3Error(503, "SlowDown"), true;
  };
  World world(settings);
  const absl::Status put = world.store->PutIfAbsent("k", "x");
  EXPECT_TRUE(absl::IsUnavailable(put));
  EXPECT_THAT(std::string(put.message()), HasSubstr("failed 8 times; the last answer: HTTP 503 SlowDown"));
}

// "200 OK" and then an error in the body: the upload is not complete (S2).
TEST(S3Store, CompleteMaySayErrorAfter200_S2) {
  std::atomic<int> left{1};
  S3Fake::Settings settings;
  settings.before = [&](const S3FakeRequest& request, S3FakeReply* reply) {
    if (request.Operation() != "Complete" || left-- <= 0) return false;
    *reply = S3Error(200, "InternalError");
    return true;
  };
  World once(settings);
  EXPECT_EQ(once.store->PutIfAbsent("k", Large()), absl::OkStatus());
  EXPECT_EQ(*once.store->Get("k", 100 << 20), Large());

  settings.before = [](const S3FakeRequest& request, S3FakeReply* reply) {
    if (request.Operation() != "Complete") return false;
    *reply = S3Error(200, "AccessDenied", "not you");
    return true;
  };
  World always(settings);
  const absl::Status put = always.store->PutIfAbsent("k", Large());
  EXPECT_FALSE(put.ok());
  EXPECT_THAT(std::string(put.message()), HasSubstr("AccessDenied: not you"));
  EXPECT_TRUE(absl::IsNotFound(always.store->Size("k").status()));
  EXPECT_EQ(always.fake->OpenUploads(), 0u);
}

// The reply is lost after the store did it: the repetition finds its own object and knows it (S3).
TEST(S3Store, ALostReplyIsNotAnotherWriter_S3) {
  for (const char* operation : {"PutObject", "Complete"}) {
    std::atomic<int> left{1};
    S3Fake::Settings settings;
    settings.after = [&](const S3FakeRequest& request, S3FakeReply* reply) {
      if (request.Operation() == operation && left-- > 0) reply->lost = true;
    };
    World world(settings);
    const std::string data = operation[0] == 'P' ? "small" : Large();
    EXPECT_EQ(world.store->PutIfAbsent("k", data), absl::OkStatus()) << operation;
    EXPECT_EQ(*world.store->Get("k", data.size()), data);
    EXPECT_LE(left, 0);
    EXPECT_TRUE(absl::IsAlreadyExists(world.store->PutIfAbsent("k", data)));  // this one is another
  }
}

// If another writer was first, the repetition is refused and never taken for one's own.
TEST(S3Store, ALostReplyOfARefusedPutStaysRefused_S3) {
  std::atomic<int> left{1};
  S3Fake::Settings settings;
  settings.after = [&](const S3FakeRequest&, S3FakeReply* reply) {
    if (reply->status == 412 && left-- > 0) reply->lost = true;
  };
  World world(settings);
  ASSERT_EQ(world.store->PutIfAbsent("k", "theirs"), absl::OkStatus());
  EXPECT_TRUE(absl::IsAlreadyExists(world.store->PutIfAbsent("k", "ours")));
  EXPECT_EQ(*world.store->Get("k", 10), "theirs");
}

TEST(S3Store, AConflictIsTriedAgain_S4) {
  std::atomic<int> left{2};
  S3Fake::Settings settings;
  settings.before = [&](const S3FakeRequest& request, S3FakeReply* reply) {
    if (request.Operation() != "PutObject" || left-- <= 0) return false;
    *reply = S3Error(409, "ConditionalRequestConflict");
    return true;
  };
  World world(settings);
  EXPECT_EQ(world.store->PutIfAbsent("k", "x"), absl::OkStatus());
  EXPECT_EQ(*world.store->Get("k", 10), "x");
}

TEST(S3Store, AStoreWithoutConditionsIsFoundOut_S5) {
  World good;
  EXPECT_EQ(ProveExclusive(good.store.get(), "probe"), absl::OkStatus());
  World bad({.ignore_conditions = true});
  const absl::Status probe = ProveExclusive(bad.store.get(), "probe");
  EXPECT_TRUE(absl::IsFailedPrecondition(probe));
  EXPECT_THAT(std::string(probe.message()), HasSubstr("If-None-Match"));
}

TEST(S3Store, WrongBucketAndWrongKeysSaySo_S10) {
  S3Options other;
  other.bucket = "elsewhere";
  World wrong_bucket({}, other);
  const absl::Status bucket = ProveExclusive(wrong_bucket.store.get(), "probe");
  EXPECT_TRUE(absl::IsPermissionDenied(bucket));
  EXPECT_THAT(std::string(bucket.message()), HasSubstr("NoSuchBucket: there is no such bucket"));
  World wrong_key({}, {}, {"AKIDEXAMPLE", "guessed"});
  const absl::Status key = ProveExclusive(wrong_key.store.get(), "probe");
  EXPECT_TRUE(absl::IsPermissionDenied(key));
  EXPECT_THAT(std::string(key.message()), HasSubstr("SignatureDoesNotMatch"));
}

TEST(S3Store, ExpiredKeysAreRenewedOnce_S9) {
  S3Fake::Settings settings;
  settings.before = [](const S3FakeRequest& request, S3FakeReply* reply) {
    if (!request.headers.contains("x-amz-security-token")) return false;
    *reply = S3Error(400, "ExpiredToken");
    return true;
  };
  World world(settings, {}, {"AKIDEXAMPLE", "secret", "old-session"});
  EXPECT_EQ(world.store->PutIfAbsent("k", "x"), absl::OkStatus());
  EXPECT_EQ(world.credentials->refused, 1);
}

// Keys that were replaced on the server, as a rotation does: the provider is asked once more, whatever the
// request. The answer to a HEAD says only 403.
TEST(S3Store, ReplacedKeysAreReadAgain_S9) {
  for (const char* code : {"InvalidAccessKeyId", "InvalidToken", "ExpiredToken"}) {
    SCOPED_TRACE(code);
    S3Fake::Settings settings;
    settings.before = [code](const S3FakeRequest& request, S3FakeReply* reply) {
      if (!request.headers.contains("x-amz-security-token")) return false;
      *reply = request.method == "HEAD" ? S3FakeReply{403} : S3Error(403, code);
      return true;
    };
    const S3Credentials replaced = {"AKIDEXAMPLE", "secret", "replaced"};
    World put(settings, {}, replaced);
    EXPECT_EQ(put.store->PutIfAbsent("k", "x"), absl::OkStatus());
    EXPECT_EQ(put.credentials->refused, 1);
    World head(settings, {}, replaced);
    EXPECT_TRUE(absl::IsNotFound(head.store->Size("k").status()));
    World list(settings, {}, replaced);
    EXPECT_TRUE(list.store->List("").ok());
    World large(settings, {}, replaced);
    EXPECT_EQ(large.store->PutIfAbsent("k", Large()), absl::OkStatus());
  }
  // Once: keys that stay bad are an error, not a loop.
  S3Fake::Settings settings;
  settings.before = [](const S3FakeRequest&, S3FakeReply* reply) {
    return *reply = S3Error(403, "InvalidAccessKeyId"), true;
  };
  World always(settings);
  EXPECT_TRUE(absl::IsPermissionDenied(always.store->PutIfAbsent("k", "x")));
  EXPECT_EQ(always.fake->Operations().size(), 2u);
}

// The patience is measured on the clock that is given, which is the monotonic one: a machine whose time of
// day is set in the middle neither gives up early nor goes on for hours.
TEST(S3Store, PatienceIsOfTheMonotonicClock) {
  class Leaping final : public Clock {
   public:
    Instant Now() const override { return {absl::ToInt64Nanoseconds(absl::Minutes(2) * ++asked_)}; }
    absl::Time WallNow() const override { return absl::UnixEpoch(); }

   private:
    mutable std::atomic<int> asked_{0};
  };
  Leaping clock;
  S3Options options;
  options.clock = &clock;
  S3Fake::Settings settings;
  settings.before = [](const S3FakeRequest&, S3FakeReply* reply) {
    return *reply = S3Error(503, "SlowDown"), true;
  };
  World world(settings, options);
  const absl::Status put = world.store->PutIfAbsent("k", "x");
  EXPECT_TRUE(absl::IsUnavailable(put));
  EXPECT_THAT(std::string(put.message()), HasSubstr("failed 2 times"));
}

TEST(S3Store, AgesAreByTheStoresClock) {
  World world({.age = absl::Hours(30)});
  ASSERT_EQ(world.store->PutIfAbsent("step/one", "1"), absl::OkStatus());
  for (const char* name : {"step", "step/one"}) {
    const auto age = world.store->Unchanged(name);
    ASSERT_TRUE(age.ok()) << age.status();
    EXPECT_GE(*age, absl::Hours(29));
    EXPECT_LE(*age, absl::Hours(31));
  }
  EXPECT_TRUE(absl::IsNotFound(world.store->Unchanged("ste").status()));
}

// More bytes than parts_max parts of the usual length hold go in longer parts, of which the store has no more
// in memory than it may send together; the condition stands for every length (S3, S5).
TEST(S3Store, PartsGrowWithTheLength_S3) {
  constexpr uint64_t kTiB = uint64_t{1} << 40, kPart = 16 << 20;
  for (const uint64_t bytes :
       {kPart + 1, 10'000 * kPart, 10'000 * kPart + 1, 3 * kTiB / 2 + 7, kS3BytesMax}) {
    const uint64_t part = S3PartBytes(bytes, kPart, 10'000);
    EXPECT_GE(part, kPart);
    EXPECT_LE(part, uint64_t{5} << 30) << "S3 takes no longer part";
    EXPECT_LE((bytes + part - 1) / part, 10'000u) << bytes;
    EXPECT_EQ(part % (1 << 20), 0u);
  }
  EXPECT_EQ(S3PartBytes(10'000 * kPart, kPart, 10'000), kPart);
  Mutex mu;
  std::vector<size_t> lengths;
  std::string condition;
  S3Fake::Settings settings;
  settings.after = [&](const S3FakeRequest& request, S3FakeReply*) {
    MutexLock lock(&mu);
    if (request.Operation() == "Part") lengths.push_back(request.body.size());
    if (request.Operation() == "Complete") condition = request.headers.at("if-none-match");
  };
  S3Options options;
  options.parts_max = 2;
  World world(settings, options);
  const std::string large = Large(25 << 20);
  ASSERT_EQ(world.store->PutIfAbsent("k", large), absl::OkStatus());
  std::sort(lengths.begin(), lengths.end());
  EXPECT_THAT(lengths, ElementsAre(12 << 20, 13 << 20));
  EXPECT_EQ(condition, "*");
  EXPECT_TRUE(*world.store->Get("k", large.size()) == large);
}

// Finding 10: what need not be read back, because the store compared it.
TEST(S3Store, SaysWhetherTheStoreComparesWhatArrives_S6) {
  World signed_ones;
  EXPECT_TRUE(signed_ones.store->ChecksEveryPut());
  if (!HaveCrc32c()) GTEST_SKIP() << "built without ISA-L";
  S3Options options;
  options.checksums = true;
  World compares({}, options);
  EXPECT_FALSE(compares.store->ChecksEveryPut());  // not known yet
  ASSERT_EQ(compares.store->PutIfAbsent("k", "x"), absl::OkStatus());
  EXPECT_TRUE(compares.store->ChecksEveryPut());
  World ignores({.ignore_checksums = true}, options);
  ASSERT_EQ(ignores.store->PutIfAbsent("k", "x"), absl::OkStatus());
  EXPECT_TRUE(ignores.store->ChecksEveryPut());  // for it went back to signed uploads
  // Over TLS no probe was made: a store that is not known to compare does not count.
  options.bucket = "bucket";
  options.endpoint = "https://store.example";
  EXPECT_FALSE((*OpenS3Store(options, *http::MakeCurlClient(""),
                             std::make_shared<FixedCredentials>(S3Credentials{"a", "b"})))
                   ->ChecksEveryPut());
  options.endpoint.clear();  // Amazon's
  EXPECT_TRUE((*OpenS3Store(options, *http::MakeCurlClient(""),
                            std::make_shared<FixedCredentials>(S3Credentials{"a", "b"})))
                  ->ChecksEveryPut());
}

TEST(S3Store, ASlowReplyAndAHugeOneEnd_S12) {
  S3Fake::Settings settings;
  settings.after = [](const S3FakeRequest& request, S3FakeReply* reply) {
    if (request.Operation() == "List") reply->body.assign(32 << 20, 'x');
    if (request.Operation() == "GetObject") reply->slow = true;
  };
  S3Options options;
  options.patience = absl::Seconds(2);
  options.attempts = 1;
  World world(settings, options);
  ASSERT_EQ(world.store->PutIfAbsent("k", "x"), absl::OkStatus());
  std::string out(1000, '?');
  EXPECT_TRUE(absl::IsUnavailable(world.store->Read("k", 0, absl::MakeSpan(out.data(), out.size()))));
  options.patience = absl::Minutes(5);  // for as much as is read of the huge one, on a busy machine
  World patient(settings, options);
  EXPECT_TRUE(absl::IsResourceExhausted(patient.store->List("").status()));
}

TEST(S3Store, RedirectsAreNotFollowed_S13) {
  S3Fake elsewhere({});
  S3Fake::Settings settings;
  settings.before = [&](const S3FakeRequest&, S3FakeReply* reply) {
    *reply = S3Error(307, "TemporaryRedirect");
    reply->headers = {{"Location", elsewhere.endpoint() + "/bucket/k"},
                      {"x-amz-bucket-region", "eu-north-1"}};
    return true;
  };
  World world(settings);
  const absl::Status put = world.store->PutIfAbsent("k", "x");
  EXPECT_TRUE(absl::IsPermissionDenied(put));
  EXPECT_THAT(std::string(put.message()), HasSubstr("AWS_REGION=eu-north-1"));
  EXPECT_THAT(elsewhere.Operations(), IsEmpty());  // credentials never left
}

TEST(S3Store, TheStoresClockIsLearned_S14) {
  for (const absl::Duration ahead : {absl::Hours(3), -absl::Hours(24)}) {
    World world({.clock_ahead = ahead});
    EXPECT_EQ(world.store->PutIfAbsent("k", "x"), absl::OkStatus());
    EXPECT_EQ(*world.store->Get("k", 10), "x");
    EXPECT_EQ(absl::c_count(world.fake->Operations(), "PutObject"), 2);  // refused once, not each time
  }
}

TEST(S3Store, AnObjectShorterThanAskedForIsNotRead_S6) {
  S3Fake::Settings settings;
  settings.after = [](const S3FakeRequest& request, S3FakeReply* reply) {
    if (request.Operation() == "GetObject") reply->body.resize(reply->body.size() / 2);
  };
  World world(settings);
  ASSERT_EQ(world.store->PutIfAbsent("k", "0123456789"), absl::OkStatus());
  char read[10];
  EXPECT_FALSE(world.store->Read("k", 0, absl::MakeSpan(read)).ok());
}

// A small object that is read whole is one request: these are asked for in each save.
TEST(S3Store, AWholeBlobIsOneRequestAndBounded) {
  World world;
  ASSERT_EQ(world.store->PutIfAbsent("k", std::string(100'000, 'x')), absl::OkStatus());
  const size_t before = world.fake->Operations().size();
  EXPECT_EQ(world.store->Get("k", 100'000)->size(), 100'000u);
  EXPECT_THAT(absl::MakeConstSpan(world.fake->Operations()).subspan(before), ElementsAre("GetObject"));
  EXPECT_TRUE(absl::IsOutOfRange(world.store->Get("k", 99'999).status()));  // also past what errors may have
  EXPECT_TRUE(absl::IsOutOfRange(world.store->Get("k", 10).status()));
}

// A writer that died in the middle leaves an upload that can be found and dropped (S8).
TEST(S3Store, UnfinishedUploadsAreListedAndDropped_S8) {
  S3Fake::Settings settings;
  std::atomic<bool> broken{true};
  settings.before = [&](const S3FakeRequest& request, S3FakeReply* reply) {
    if (!broken || (request.Operation() != "Part" && request.Operation() != "Abort")) return false;
    *reply = S3Error(403, "AccessDenied");
    return true;
  };
  World world(settings);
  EXPECT_TRUE(absl::IsPermissionDenied(world.store->PutIfAbsent("step/shard", Large())));
  broken = false;
  const auto unfinished = world.store->ListUnfinished();
  ASSERT_TRUE(unfinished.ok());
  ASSERT_EQ(unfinished->size(), 1u);
  EXPECT_EQ((*unfinished)[0].key, "step/shard");
  EXPECT_EQ(world.store->DropUnfinished((*unfinished)[0]), absl::OkStatus());
  EXPECT_EQ(world.fake->OpenUploads(), 0u);
}

// The data of the first `flips` puts arrives with a bit flipped.
class FlippingClient final : public http::Client {
 public:
  explicit FlippingClient(int flips) : left_(flips) {}
  absl::StatusOr<http::Reply> Do(const http::Request& request) override {
    if (request.method != "PUT" || request.body.empty() || left_-- <= 0) return base_->Do(request);
    std::string body;
    for (const absl::string_view part : request.body) body.append(part.data(), part.size());
    body[body.size() / 2] ^= 4;
    http::Request flipped = request;
    flipped.body = {body};
    return base_->Do(flipped);
  }

 private:
  const std::unique_ptr<http::Client> base_ = *http::MakeCurlClient("");
  std::atomic<int> left_;
};

TEST(S3Store, ABitFlippedOnTheWayIsRefusedAndSentAgain_S6) {
  for (const bool checksums : {false, true}) {
    if (checksums && !HaveCrc32c()) continue;
    S3Options options;
    options.checksums = checksums;
    // The probe for checksums is a put, too, and wrong in any case.
    World world({}, options, {"AKIDEXAMPLE", "secret"}, std::make_shared<FlippingClient>(3));
    EXPECT_EQ(world.store->PutIfAbsent("small", "0123456789"), absl::OkStatus());
    EXPECT_EQ(*world.store->Get("small", 100), "0123456789");
    const std::string large = Large();
    World parts({}, options, {"AKIDEXAMPLE", "secret"}, std::make_shared<FlippingClient>(3));
    EXPECT_EQ(parts.store->PutIfAbsent("large", large), absl::OkStatus());
    EXPECT_TRUE(*parts.store->Get("large", large.size()) == large);
    World always({}, options, {"AKIDEXAMPLE", "secret"}, std::make_shared<FlippingClient>(1000));
    EXPECT_TRUE(absl::IsUnavailable(always.store->PutIfAbsent("k", "0123456789")));
    EXPECT_TRUE(absl::IsNotFound(always.store->Get("k", 100).status()));
  }
}

TEST(S3Store, WithChecksumsNothingIsHashedForTheSignature) {
  if (!HaveCrc32c()) GTEST_SKIP() << "built without ISA-L";
  Mutex mu;
  std::vector<std::string> unsigned_ones;
  S3Fake::Settings settings;
  settings.after = [&](const S3FakeRequest& request, S3FakeReply*) {
    MutexLock lock(&mu);
    if (request.headers.at("x-amz-content-sha256") == "UNSIGNED-PAYLOAD")
      unsigned_ones.push_back(request.Operation());
  };
  S3Options options;
  options.checksums = true;
  World world(settings, options);
  const std::string large = Large();
  ASSERT_EQ(world.store->PutIfAbsent("small", "x"), absl::OkStatus());
  ASSERT_EQ(world.store->PutIfAbsent("large", large), absl::OkStatus());
  EXPECT_TRUE(*world.store->Get("large", large.size()) == large);
  EXPECT_THAT(unsigned_ones, ElementsAre("PutObject", "Part", "Part", "Part"));
  EXPECT_EQ(absl::c_count(world.fake->Operations(), "PutObject"), 2);  // the probe is the first, and refused
}

// A store that ignores what it does not know, over plain HTTP, or one that says no to it.
TEST(S3Store, WithoutAStoreThatComparesChecksumsUploadsAreSigned_S6_S11) {
  if (!HaveCrc32c()) GTEST_SKIP() << "built without ISA-L";
  const std::string large = Large();
  S3Options options;
  options.checksums = true;
  for (const int refused : {0, 400, 501}) {
    SCOPED_TRACE(refused);
    std::atomic<int> not_signed{0};
    S3Fake::Settings settings;
    settings.ignore_checksums = refused == 0;
    settings.before = [refused](const S3FakeRequest& request, S3FakeReply* reply) {
      const bool asked = request.headers.contains("x-amz-checksum-crc32c") ||
                         request.headers.contains("x-amz-checksum-algorithm");
      if (!asked || refused == 0) return false;
      *reply = S3Error(refused, refused == 400 ? "InvalidRequest" : "NotImplemented");
      return true;
    };
    settings.after = [&](const S3FakeRequest& request, S3FakeReply*) {
      const bool probe = absl::StrContains(request.path, "/probe-");
      not_signed += !probe && request.headers.at("x-amz-content-sha256") == "UNSIGNED-PAYLOAD" ? 1 : 0;
    };
    World world(settings, options);
    EXPECT_EQ(world.store->PutIfAbsent("small", "x"), absl::OkStatus());
    EXPECT_EQ(world.store->PutIfAbsent("large", large), absl::OkStatus());
    EXPECT_TRUE(*world.store->Get("large", large.size()) == large);
    EXPECT_THAT(*world.store->List("probe-"), IsEmpty());
    EXPECT_EQ(not_signed, 0);
    World parts(settings, options);  // whose first request begins a multipart upload
    EXPECT_EQ(parts.store->PutIfAbsent("large", large), absl::OkStatus());
    EXPECT_TRUE(*parts.store->Get("large", large.size()) == large);
  }
}

TEST(Crc32c, IsThatOfTheStandard) {
  if (!HaveCrc32c()) GTEST_SKIP() << "built without ISA-L";
  const absl::string_view parts[] = {"1234", "", "56789"};
  EXPECT_EQ(Crc32cBase64(parts), "4waSgw==");  // RFC 3720, B.4: 0xe3069283
}

TEST(S3Uri, IsReadWithTheEnvironment) {
  const auto parse = [](absl::string_view uri, std::map<std::string, std::string> environment) {
    return ParseS3Uri(uri, [environment](const char* name) -> std::optional<std::string> {
      const auto it = environment.find(name);
      return it == environment.end() ? std::nullopt : std::optional<std::string>(it->second);
    });
  };
  const auto plain = parse("s3://my-bucket/a/b/", {{"AWS_REGION", "eu-west-1"}});
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->bucket, "my-bucket");
  EXPECT_EQ(plain->prefix, "a/b");
  EXPECT_EQ(plain->region, "eu-west-1");
  EXPECT_FALSE(plain->path_style);
  EXPECT_TRUE(parse("s3://b.with.dots", {})->path_style);
  EXPECT_TRUE(parse("s3://bucket", {{"AWS_ENDPOINT_URL", "http://127.0.0.1:9000/"}})->path_style);
  EXPECT_FALSE(parse("s3://bucket", {{"AWS_ENDPOINT_URL", "http://h:1"}, {"GTRAIN_S3_ADDRESSING", "virtual"}})
                   ->path_style);
  EXPECT_EQ(plain->checksums, HaveCrc32c());
  EXPECT_FALSE(parse("s3://bucket", {{"AWS_ENDPOINT_URL", "http://h:1"}})->checksums);
  EXPECT_EQ(parse("s3://bucket", {{"AWS_ENDPOINT_URL", "https://h:1"}})->checksums, HaveCrc32c());
  EXPECT_FALSE(parse("s3://bucket", {{"GTRAIN_S3_PAYLOAD", "signed"}})->checksums);
  EXPECT_EQ(
      parse("s3://bucket", {{"AWS_ENDPOINT_URL", "http://h:1"}, {"GTRAIN_S3_PAYLOAD", "checksum"}}).ok(),
      HaveCrc32c());
  EXPECT_TRUE(absl::IsInvalidArgument(parse("s3://bucket", {{"GTRAIN_S3_PAYLOAD", "no"}}).status()));
  for (const char* bad : {"s3://", "s3://UPPER", "s3://ab", "s3://-abc", "s3://a..b", "s3://bucket/../x",
                          "s3://bucket/a b", "/dir", "s3:///x"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(parse(bad, {}).status())) << bad;
  }
  for (const char* endpoint : {"ftp://x", "http://", "http://169.254.169.254", "http://user@host",
                               "http://h/path", "http://[fd00:ec2::254]"}) {  // X11
    EXPECT_TRUE(absl::IsInvalidArgument(parse("s3://bucket", {{"AWS_ENDPOINT_URL_S3", endpoint}}).status()))
        << endpoint;
  }
}

TEST(Xml, TakesWhatS3SaysAndRefusesTheRest_B11) {
  const auto good = ParseXml("<?xml version=\"1.0\"?><a xmlns=\"u\"><b>x &amp; y</b><b>z</b></a>");
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ(good->Text("b"), "x & y");
  std::string deep, wide = "<a>";
  for (int i = 0; i < 20; ++i) deep += "<a>";
  for (int i = 0; i < 30000; ++i) wide += "<b/>";
  for (const std::string& bad :
       {std::string(""), std::string("<a>"), std::string("<a></b>"), std::string("<a/><b/>"),
        std::string("<n:/>"), std::string("<a><n:/>text<b></b></a>"), std::string("\0<a/>", 5),
        std::string("<!DOCTYPE a [<!ENTITY e \"x\">]><a>&e;</a>"),
        std::string("<!DOCTYPE a SYSTEM \"file:///etc/passwd\"><a/>"), std::string("<a>&undefined;</a>"),
        deep, wide + "</a>"}) {
    EXPECT_TRUE(absl::IsDataLoss(ParseXml(bad).status())) << bad.substr(0, 40);
  }
}

}  // namespace
}  // namespace gtrain::ckpt
