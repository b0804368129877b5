# The interface of actors_capnp.cc.
@0x9d2d8f5b6c1e4a37;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("gtrain::bench");

interface Counter {
  add @0 (by :Int64) -> (value :Int64);
  take @1 (bytes :Data) -> (value :Int64);
}
