// The only file that speaks UCX. Built as libgtrain_comm_ucx.so.
//
// Settings (ucp_config_modify, never the environment of a process that is not ours): transports and devices
// are the loader's choice. TCP has non-blocking connects, because a blocking one can hang for minutes.
// Endpoints carry the peer error mode, which tcp, rc, ud and dc have: it is what makes a forced close, and so
// an abort that needs nobody's help, legal. UCX's module for RDMA is loaded only where more than TCP is to be
// used, and UCX prints nothing: standard output belongs to the program. (Memory hooks and signal
// handlers are kept away by the loader, because UCX installs them while it is being loaded.)
//
// Messages are tagged; a receive names its exact tag. An operation that UCX finished is marked in its Ticket
// by the callback, which runs inside progress, post or close and thus on the caller's thread.
#include <poll.h>
#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>
#include <uct/api/uct.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "comm/ucx/ucx_abi.h"

namespace {

constexpr uint64_t kWholeTag = ~uint64_t{0};
constexpr int kForcedCloseMs = 5000;

using Clock = std::chrono::steady_clock;

struct Ticket {
  int peer = -1;  // of a receive: whose failure ends it
  bool receive = false;
  size_t bytes = 0;
  size_t* received = nullptr;  // where a receive of any size up to `bytes` tells it
  void* request = nullptr;     // nullptr once complete
  ucs_status_t status = UCS_INPROGRESS;
};

struct Peer {
  ucp_ep_h endpoint = nullptr;
  ucs_status_t failed = UCS_OK;
};

void Say(GtrainUcxError* error, const std::string& text) {
  std::snprintf(error->text, sizeof(error->text), "%s", text.c_str());
}

void Say(GtrainUcxError* error, const char* what, ucs_status_t status) {
  Say(error, std::string(what) + ": " + ucs_status_string(status));
}

}  // namespace

struct GtrainUcxWorker {
  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;
  ucp_address_t* address = nullptr;
  size_t address_bytes = 0;
  int event_fd = -1;
  std::vector<std::unique_ptr<Peer>> peers;
  std::set<Ticket*> open;  // not yet complete
};

namespace {

// ------------------------------------------------------------------ set-up

// Of the process. Modules are loaded once, by the first worker.
void SetGlobals(const std::string& transports) {
  ucs_global_opts_set_value("LOG_LEVEL", "fatal");
  ucs_global_opts_set_value("MODULES", transports == "tcp" ? "none" : "ib");
  ucs_global_opts_set_value("MEMTYPE_CACHE", "n");
}

ucs_status_t InitContext(const char* transports, const char* devices, ucp_context_h* context) {
  ucp_config_t* config = nullptr;
  // A prefix of our own: UCX_* of the environment is meant for other libraries of the process (MPI).
  ucs_status_t status = ucp_config_read("GTRAIN", nullptr, &config);
  if (status != UCS_OK) return status;
  const struct {
    const char* name;
    const char* value;
  } settings[] = {{"TLS", transports},
                  {"TCP_CONN_NB", "y"},
                  // UcxTransport::Call decides when an endpoint asks for the peer's identity.
                  {"RESOLVE_REMOTE_EP_ID", "n"},
                  {"NET_DEVICES", devices}};
  for (const auto& setting : settings) {
    status = ucp_config_modify(config, setting.name, setting.value);
    if (status != UCS_OK) break;
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  if (status == UCS_OK) status = ucp_init(&params, config, context);
  ucp_config_release(config);
  return status;
}

ucs_status_t InitWorker(GtrainUcxWorker* w) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucs_status_t status = ucp_worker_create(w->context, &params, &w->worker);
  if (status == UCS_OK) status = ucp_worker_get_efd(w->worker, &w->event_fd);
  if (status == UCS_OK) status = ucp_worker_get_address(w->worker, &w->address, &w->address_bytes);
  return status;
}

void Destroy(GtrainUcxWorker* w) {
  if (w->address != nullptr) ucp_worker_release_address(w->worker, w->address);
  if (w->worker != nullptr) ucp_worker_destroy(w->worker);
  if (w->context != nullptr) ucp_cleanup(w->context);
  for (Ticket* ticket : w->open) delete ticket;
  delete w;
}

struct NetworkTransport {
  std::string name, device;  // "tcp", "eth0"
};

void AddNetworkTransports(uct_component_h component, const char* domain,
                          std::vector<NetworkTransport>* found) {
  uct_md_config_t* config = nullptr;
  uct_md_h md = nullptr;
  uct_tl_resource_desc_t* transports = nullptr;
  unsigned count = 0;
  if (uct_md_config_read(component, nullptr, nullptr, &config) != UCS_OK) return;
  const ucs_status_t opened = uct_md_open(component, domain, config, &md);
  uct_config_release(config);
  if (opened != UCS_OK) return;
  if (uct_md_query_tl_resources(md, &transports, &count) == UCS_OK) {
    for (unsigned i = 0; i < count; ++i) {
      if (transports[i].dev_type == UCT_DEVICE_TYPE_NET)
        found->push_back({transports[i].tl_name, transports[i].dev_name});
    }
    uct_release_tl_resource_list(transports);
  }
  uct_md_close(md);
}

// What UCX finds on this machine.
std::vector<NetworkTransport> NetworkTransports() {
  std::vector<NetworkTransport> found;
  uct_component_h* components = nullptr;
  unsigned count = 0;
  if (uct_query_components(&components, &count) != UCS_OK) return found;
  for (unsigned i = 0; i < count; ++i) {
    uct_component_attr_t attr{};
    attr.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT;
    if (uct_component_query(components[i], &attr) != UCS_OK) continue;
    std::vector<uct_md_resource_desc_t> domains(attr.md_resource_count);
    attr.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCES;
    attr.md_resources = domains.data();
    if (domains.empty() || uct_component_query(components[i], &attr) != UCS_OK) continue;
    for (const auto& domain : domains) AddNetworkTransports(components[i], domain.md_name, &found);
  }
  uct_release_component_list(components);
  return found;
}

// UCX's short names: rc is rc_verbs and rc_mlx5, rc_v and rc_x one of them; ib is all of the three kinds.
bool Means(const std::string& name, const std::string& transport) {
  if (name == transport) return true;
  const std::string kind = transport.substr(0, 2);
  if (transport.find('_') != 2 || (kind != "rc" && kind != "ud" && kind != "dc")) return false;
  return name == "ib" || name == kind || name == kind + (transport == kind + "_verbs" ? "_v" : "_x");
}

std::vector<std::string> Names(const std::string& list) {
  std::vector<std::string> names;
  std::istringstream in(list);
  for (std::string name; std::getline(in, name, ',');) names.push_back(name);
  return names;
}

// UCX goes without a transport that is not there as long as another one is. Empty: all are there.
std::string WhatIsMissing(const std::string& transports, const std::string& devices) {
  const std::vector<NetworkTransport> here = NetworkTransports();
  const std::vector<std::string> usable = Names(devices);
  std::string missing, offers;
  for (const std::string& name : Names(transports)) {
    const bool found = std::any_of(here.begin(), here.end(), [&](const NetworkTransport& t) {
      return Means(name, t.name) &&
             (devices == "all" || std::find(usable.begin(), usable.end(), t.device) != usable.end());
    });
    if (!found) missing += (missing.empty() ? "" : ",") + name;
  }
  if (missing.empty()) return "";
  for (const NetworkTransport& t : here) offers += (offers.empty() ? "" : ", ") + t.name + " on " + t.device;
  return "no " + missing + " on " + devices + "; UCX finds here: " + (offers.empty() ? "nothing" : offers);
}

GtrainUcxWorker* Open(const char* transports, const char* devices, int every, GtrainUcxError* error) {
  SetGlobals(transports);
  if (every != 0) {
    const std::string missing = WhatIsMissing(transports, devices);
    if (!missing.empty()) {
      Say(error, missing);
      return nullptr;
    }
  }
  auto* w = new GtrainUcxWorker;
  ucs_status_t status = InitContext(transports, devices, &w->context);
  if (status == UCS_OK) status = InitWorker(w);
  if (status == UCS_OK) return w;
  Say(error, "cannot open UCX", status);
  Destroy(w);
  return nullptr;
}

void Address(GtrainUcxWorker* w, const void** data, size_t* bytes) {
  *data = w->address;
  *bytes = w->address_bytes;
}

void OnEndpointError(void* peer, ucp_ep_h, ucs_status_t status) { static_cast<Peer*>(peer)->failed = status; }

Peer& PeerOf(GtrainUcxWorker* w, int peer) {
  const auto index = static_cast<size_t>(peer);
  while (w->peers.size() <= index) w->peers.push_back(std::make_unique<Peer>());
  return *w->peers[index];
}

int Connect(GtrainUcxWorker* w, int peer, const void* address, GtrainUcxError* error) {
  Peer& to = PeerOf(w, peer);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = static_cast<const ucp_address_t*>(address);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {OnEndpointError, &to};
  const ucs_status_t status = ucp_ep_create(w->worker, &params, &to.endpoint);
  if (status == UCS_OK) return 0;
  Say(error, ucs_status_string(status));
  return -1;
}

// ------------------------------------------------------------------ messages

void Finish(void* request, Ticket* ticket, ucs_status_t status) {
  ticket->status = status;
  ticket->request = nullptr;
  ucp_request_free(request);
}

void OnSent(void* request, ucs_status_t status, void* ticket) {
  Finish(request, static_cast<Ticket*>(ticket), status);
}

void OnReceived(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* user) {
  Ticket* ticket = static_cast<Ticket*>(user);
  if (status == UCS_OK && ticket->received != nullptr) {
    *ticket->received = info->length;
  } else if (status == UCS_OK && info->length != ticket->bytes) {
    status = UCS_ERR_MESSAGE_TRUNCATED;
  }
  Finish(request, ticket, status);
}

// Takes what an operation returned: done at once, failed, or under way.
void* Track(GtrainUcxWorker* w, Ticket* ticket, ucs_status_ptr_t result, GtrainUcxError* error) {
  if (UCS_PTR_IS_ERR(result)) {
    Say(error, "cannot start a message", UCS_PTR_STATUS(result));
    delete ticket;
    return nullptr;
  }
  if (result == nullptr) {
    ticket->status = UCS_OK;
  } else if (ticket->status == UCS_INPROGRESS) {
    ticket->request = result;
  }
  w->open.insert(ticket);
  return ticket;
}

void* Post(GtrainUcxWorker* w, int peer, GtrainUcxWay way, void* data, size_t bytes, uint64_t tag,
           size_t* received, GtrainUcxError* error) {
  Ticket* ticket = new Ticket;
  ticket->peer = peer;
  ticket->bytes = bytes;
  ticket->received = received;
  ticket->receive = way == GTRAIN_UCX_RECEIVE;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.user_data = ticket;
  if (way != GTRAIN_UCX_RECEIVE) {
    params.cb.send = OnSent;
    const auto send = way == GTRAIN_UCX_SEND ? ucp_tag_send_nbx : ucp_tag_send_sync_nbx;
    return Track(w, ticket, send(PeerOf(w, peer).endpoint, data, bytes, tag, &params), error);
  }
  // A completed receive must report its length: never at once, always by the callback.
  params.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  params.cb.recv = OnReceived;
  return Track(w, ticket, ucp_tag_recv_nbx(w->worker, data, bytes, tag, kWholeTag, &params), error);
}

int Find(GtrainUcxWorker* w, uint64_t tag, uint64_t mask, uint64_t* found, size_t* bytes) {
  ucp_tag_recv_info_t info{};
  if (ucp_tag_probe_nb(w->worker, tag, mask, /*remove=*/0, &info) == nullptr) return 0;
  *found = info.sender_tag;
  *bytes = info.length;
  return 1;
}

void* Flush(GtrainUcxWorker* w, GtrainUcxError* error) {
  Ticket* ticket = new Ticket;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.user_data = ticket;
  params.cb.send = OnSent;
  return Track(w, ticket, ucp_worker_flush_nbx(w->worker, &params), error);
}

int Test(GtrainUcxWorker* w, void* opaque, GtrainUcxError* error) {
  Ticket* ticket = static_cast<Ticket*>(opaque);
  if (ticket->status == UCS_INPROGRESS) {
    // Nobody completes a receive from a peer whose connection broke.
    const ucs_status_t failed = ticket->receive ? PeerOf(w, ticket->peer).failed : UCS_OK;
    if (failed == UCS_OK) return 0;
    Say(error, ucs_status_string(failed));
    return -1;
  }
  const ucs_status_t status = ticket->status;
  w->open.erase(ticket);
  delete ticket;
  if (status == UCS_OK) return 1;
  Say(error, ucs_status_string(status));
  return -1;
}

int Progress(GtrainUcxWorker* w, int wait_ms) {
  const int moved = static_cast<int>(ucp_worker_progress(w->worker));
  if (moved != 0 || wait_ms == 0) return moved;
  if (ucp_worker_arm(w->worker) != UCS_OK) return 0;  // something came in between
  pollfd fd{w->event_fd, POLLIN, 0};
  poll(&fd, 1, wait_ms);
  return 0;
}

// ------------------------------------------------------------------ the end

bool Idle(const GtrainUcxWorker* w) {
  for (const Ticket* ticket : w->open) {
    if (ticket->status == UCS_INPROGRESS) return false;
  }
  return true;
}

// Closes all endpoints and moves things on until everything has ended or time is up.
bool CloseEndpoints(GtrainUcxWorker* w, bool force, int milliseconds) {
  const Clock::time_point end = Clock::now() + std::chrono::milliseconds(milliseconds);
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0;
  std::vector<void*> closing;
  for (auto& peer : w->peers) {
    if (peer->endpoint == nullptr) continue;
    void* request = ucp_ep_close_nbx(peer->endpoint, &params);
    if (UCS_PTR_IS_PTR(request)) closing.push_back(request);
    peer->endpoint = nullptr;
  }
  auto pending = [&] {
    for (void* request : closing) {
      if (ucp_request_check_status(request) == UCS_INPROGRESS) return true;
    }
    return force && !Idle(w);
  };
  bool in_time = true;
  while (pending() && (in_time = Clock::now() < end)) Progress(w, 1);
  for (void* request : closing) ucp_request_free(request);
  return in_time;
}

void Close(GtrainUcxWorker* w, int grace_ms) {
  const std::set<Ticket*> open = w->open;
  for (Ticket* ticket : open) {
    if (ticket->receive && ticket->request != nullptr) ucp_request_cancel(w->worker, ticket->request);
  }
  if (grace_ms == 0 || !Idle(w)) {
    CloseEndpoints(w, /*force=*/true, kForcedCloseMs);
  } else {
    CloseEndpoints(w, /*force=*/false, grace_ms);
  }
  Destroy(w);
}

constexpr GtrainUcxApi kApi = {
    GTRAIN_UCX_ABI, sizeof(GtrainUcxApi), Open, Address, Connect, Post, Find, Flush, Test, Progress, Close};

}  // namespace

extern "C" __attribute__((visibility("default"))) const GtrainUcxApi* gtrain_ucx_api(void) { return &kApi; }
