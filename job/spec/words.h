// The words of `run:`, which never go through a shell (faults J10 J15). PURE.
#pragma once
#include <array>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::spec {

// Splits at spaces; '...' and "..." group, a backslash takes the next character as it is. A
// character that only a shell would act on (| & ; < > $ ` or a newline, outside single quotes) is
// InvalidArgument with a message that points to `script:`.
absl::StatusOr<std::vector<std::string>> SplitWords(absl::string_view text);

// Replaces ${NAME} by its value, once (values are not looked at again), and $$ by $.
// InvalidArgument names what is undefined, badly written or may be a secret (fault J11).
absl::StatusOr<std::string> ExpandVariables(absl::string_view text,
                                            const std::map<std::string, std::string>& variables);

// The name of the secret that `text` seems to hold ("an AWS access key id"), "" if none
// is seen. Never returns any of the text itself (fault J11).
std::string LooksLikeSecret(absl::string_view text);

// Whether variables with this name hold secrets by custom: HF_TOKEN, WANDB_API_KEY.
bool IsNamedLikeSecret(absl::string_view name);

// Whether the value of such a variable may be one: a password, whatever it is; else 20 and more letters and
// digits in one word. PAD_TOKEN=<pad> and SIGNING_PRIVATE_KEY=/etc/key are none.
bool MayBeSecret(absl::string_view name, absl::string_view value);

// [A-Za-z_][A-Za-z0-9_]{0,255}
bool IsEnvName(absl::string_view name);
// The variables that a user may set among the names that begin with GTRAIN_, which are gtrain's to set: where
// python/gtrain finds libgtrain.so, how an all-reduce goes between machines, over which network, and whether
// actors use shared memory.
inline constexpr std::array<absl::string_view, 4> kUsersGtrainVariables = {
    "GTRAIN_LIBRARY", "GTRAIN_COMM_ALGO", "GTRAIN_COMM_TLS", "GTRAIN_ACTORS_SHM"};
bool IsUsersGtrainVariable(absl::string_view name);

// [a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?  (fault J9)
bool IsJobName(absl::string_view name);

}  // namespace gtrain::spec
