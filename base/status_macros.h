// GT_RETURN_IF_ERROR(expr) and GT_ASSIGN_OR_RETURN(lhs, expr): the only two
// status macros; anything longer is written out.
#pragma once
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define GT_CONCAT_INNER(a, b) a##b
#define GT_CONCAT(a, b) GT_CONCAT_INNER(a, b)

#define GT_RETURN_IF_ERROR(expr)                            \
  do {                                                      \
    if (absl::Status gt_status = (expr); !gt_status.ok()) { \
      return gt_status;                                     \
    }                                                       \
  } while (false)

#define GT_ASSIGN_OR_RETURN(lhs, expr) GT_ASSIGN_OR_RETURN_INNER(GT_CONCAT(gt_statusor_, __LINE__), lhs, expr)
#define GT_ASSIGN_OR_RETURN_INNER(tmp, lhs, expr) \
  auto tmp = (expr);                              \
  if (!tmp.ok()) return tmp.status();             \
  lhs = *std::move(tmp)
