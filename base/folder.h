// Folders in which somebody else may have prepared something: a run directory below a folder that many may
// write. Whatever is opened here was reached only through what root or the caller made, so nobody else can
// lead the caller's writes to another file. Without absl: the keeper uses it.
#pragma once
#include <string>

#include "base/unique_fd.h"

namespace gtrain {

struct FolderOptions {
  bool make = false;           // what is missing is made, with mode 0755
  bool to_read = false;        // nothing will be written: the folder may be anybody's
  std::string* why = nullptr;  // a sentence for people when it fails: what, where and what to do
};

// Opens the folder `path` for openat() and its like. A symbolic link on the way is followed if it belongs to
// root or to the caller (a home or a scratch disk that is a link) and refused if it is anybody else's. The
// folder itself must belong to root or to the caller, unless its file system shows all files as one user's.
// Not valid: errno says why, EPERM for what belongs to somebody else.
UniqueFd OpenFolder(const std::string& path, const FolderOptions& options = {});

// Opens in the same way `inside`, a relative path of names below `folder`: no link is followed, whoever made
// it.
UniqueFd OpenFolderInside(const UniqueFd& folder, const std::string& inside,
                          const FolderOptions& options = {});

// The folder that holds the file `path`, and the name of the file in it.
struct FilePlace {
  UniqueFd folder;
  std::string name;
};
FilePlace OpenFolderOf(const std::string& path, const FolderOptions& options = {});

}  // namespace gtrain
