// What every long-lived process of ours does first.
#pragma once

namespace gtrain {

// Other processes of the same user cannot attach a debugger to this one, read its memory, its environment or
// its descriptors in /proc; it leaves no core file (fault X6).
void HideFromOtherProcesses();

// As many descriptors as the system lets this process have.
void RaiseFileLimit();

// Whether this is a container, where root is the ordinary user. Known by what the container's maker left in
// the file system, never by an environment variable: a typo must not change what is allowed (fault X15).
bool InContainer();

}  // namespace gtrain
