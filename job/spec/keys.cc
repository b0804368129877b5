#include "job/spec/keys.h"

#include "job/spec/job_reader.h"

namespace gtrain::spec {

std::vector<std::string> JobKeys() {
  Report report;  // what a section without its keys lacks is nobody's error
  const ParseOptions options;
  return JobReader(options, report).Keys();
}

}  // namespace gtrain::spec
