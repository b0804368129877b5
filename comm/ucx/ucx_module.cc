// The only file that speaks UCX. Built as libgtrain_comm_ucx.so.
//
// Settings (ucp_config_modify, never the environment of a process that is not ours): transports and devices
// are the loader's choice. TCP has non-blocking connects, because a blocking one can hang for minutes.
// Endpoints carry the peer error mode, which tcp, rc, ud and dc have: it is what makes a forced close, and so
// an abort that needs nobody's help, legal. UCX's module for RDMA is loaded only where more than TCP is to be
// used, and UCX prints nothing: standard output belongs to the program. (Memory hooks and signal
// handlers are kept away by the loader, because UCX installs them while it is being loaded.)
//
// Messages are active messages, always eager: what comes is handed on as it is, and what nobody wants any
// more is gone; a rendezvous would keep its sender waiting and, between two processes of which one dies, can
// end the other (openucx/ucx#8175). Their headers belong to the loader and are part of the bytes, because
// UCX 1.13 sends one piece of memory without a request, but a header and a piece not. An operation that UCX
// finished is marked in its ticket by the callback, which runs inside progress, send or close and thus on the
// caller's thread.
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
#include <utility>
#include <vector>

#include "comm/ucx/ucx_abi.h"

namespace {

constexpr unsigned kMessageId = 0;
constexpr int kForcedCloseMs = 5000;

using Clock = std::chrono::steady_clock;

void Say(GtrainUcxError* error, const std::string& text) {
  std::snprintf(error->text, sizeof(error->text), "%s", text.c_str());
}

void Say(GtrainUcxError* error, const char* what, ucs_status_t status) {
  Say(error, std::string(what) + ": " + ucs_status_string(status));
}

}  // namespace

struct GtrainUcxTicket {
  void* request = nullptr;  // nullptr once complete
  ucs_status_t status = UCS_INPROGRESS;
};

struct GtrainUcxEndpoint {
  ucp_ep_h endpoint = nullptr;
  ucs_status_t failed = UCS_OK;
};

struct GtrainUcxWorker {
  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;
  ucp_address_t* address = nullptr;
  size_t address_bytes = 0;
  int event_fd = -1;
  GtrainUcxHeard heard = nullptr;
  void* user = nullptr;
  // Holds dropped endpoints, too: UCX may still report about them.
  std::vector<std::unique_ptr<GtrainUcxEndpoint>> endpoints;
  std::set<GtrainUcxTicket*> open;  // not yet spent
  std::vector<void*> closing;       // requests of drop
};

namespace {

// ------------------------------------------------------------------ set-up

// Sets the options of the process. UCX loads its modules once, for the first worker.
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
                  // Nothing that is sent needs the peer's identity.
                  {"RESOLVE_REMOTE_EP_ID", "n"},
                  {"NET_DEVICES", devices}};
  for (const auto& setting : settings) {
    status = ucp_config_modify(config, setting.name, setting.value);
    if (status != UCS_OK) break;
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  if (status == UCS_OK) status = ucp_init(&params, config, context);
  ucp_config_release(config);
  return status;
}

ucs_status_t OnMessage(void* worker, const void*, size_t, void* data, size_t bytes,
                       const ucp_am_recv_param_t* param) {
  auto* w = static_cast<GtrainUcxWorker*>(worker);
  // A message of a rendezvous, which nobody here begins, has no data yet.
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) w->heard(w->user, data, bytes);
  return UCS_OK;
}

ucs_status_t InitWorker(GtrainUcxWorker* w) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucs_status_t status = ucp_worker_create(w->context, &params, &w->worker);
  if (status == UCS_OK) {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kMessageId;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = OnMessage;
    handler.arg = w;
    status = ucp_worker_set_am_recv_handler(w->worker, &handler);
  }
  if (status == UCS_OK) status = ucp_worker_get_efd(w->worker, &w->event_fd);
  if (status == UCS_OK) status = ucp_worker_get_address(w->worker, &w->address, &w->address_bytes);
  return status;
}

void Destroy(GtrainUcxWorker* w) {
  for (void* request : w->closing) ucp_request_free(request);
  if (w->address != nullptr) ucp_worker_release_address(w->worker, w->address);
  if (w->worker != nullptr) ucp_worker_destroy(w->worker);
  if (w->context != nullptr) ucp_cleanup(w->context);
  for (GtrainUcxTicket* ticket : w->open) delete ticket;
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

// Lists the transports that UCX finds on this machine.
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

GtrainUcxWorker* Open(const char* transports, const char* devices, int every, GtrainUcxHeard heard,
                      void* user, GtrainUcxError* error) {
  SetGlobals(transports);
  if (every != 0) {
    const std::string missing = WhatIsMissing(transports, devices);
    if (!missing.empty()) {
      Say(error, missing);
      return nullptr;
    }
  }
  auto* w = new GtrainUcxWorker;
  w->heard = heard;
  w->user = user;
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

void OnEndpointError(void* endpoint, ucp_ep_h, ucs_status_t status) {
  static_cast<GtrainUcxEndpoint*>(endpoint)->failed = status;
}

GtrainUcxEndpoint* Connect(GtrainUcxWorker* w, const void* address, GtrainUcxError* error) {
  auto to = std::make_unique<GtrainUcxEndpoint>();
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = static_cast<const ucp_address_t*>(address);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {OnEndpointError, to.get()};
  const ucs_status_t status = ucp_ep_create(w->worker, &params, &to->endpoint);
  if (status != UCS_OK) {
    Say(error, ucs_status_string(status));
    return nullptr;
  }
  w->endpoints.push_back(std::move(to));
  return w->endpoints.back().get();
}

const char* Failed(const GtrainUcxEndpoint* endpoint) {
  return endpoint->failed == UCS_OK ? nullptr : ucs_status_string(endpoint->failed);
}

// ------------------------------------------------------------------ messages

void OnSent(void* request, ucs_status_t status, void* user) {
  auto* ticket = static_cast<GtrainUcxTicket*>(user);
  ticket->status = status;
  ticket->request = nullptr;
  ucp_request_free(request);
}

// Takes what an operation returned: done at once, failed, or under way.
int Track(GtrainUcxWorker* w, std::unique_ptr<GtrainUcxTicket> ticket, ucs_status_ptr_t result,
          GtrainUcxTicket** to, GtrainUcxError* error) {
  if (UCS_PTR_IS_ERR(result)) {
    Say(error, ucs_status_string(UCS_PTR_STATUS(result)));
    return -1;
  }
  if (result == nullptr) return 1;
  if (ticket->status == UCS_INPROGRESS) ticket->request = result;
  *to = ticket.get();
  w->open.insert(ticket.release());
  return 0;
}

ucp_request_param_t Params(GtrainUcxTicket* ticket) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.user_data = ticket;
  params.cb.send = OnSent;
  return params;
}

int Send(GtrainUcxWorker* w, GtrainUcxEndpoint* endpoint, const void* data, size_t bytes,
         GtrainUcxTicket** to, GtrainUcxError* error) {
  auto ticket = std::make_unique<GtrainUcxTicket>();
  ucp_request_param_t params = Params(ticket.get());
  params.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_AM_SEND_FLAG_EAGER;
  const ucs_status_ptr_t result =
      ucp_am_send_nbx(endpoint->endpoint, kMessageId, nullptr, 0, data, bytes, &params);
  return Track(w, std::move(ticket), result, to, error);
}

int Flush(GtrainUcxWorker* w, GtrainUcxTicket** to, GtrainUcxError* error) {
  auto ticket = std::make_unique<GtrainUcxTicket>();
  const ucp_request_param_t params = Params(ticket.get());
  // This does not flush one endpoint: that asks the peer, and waits until it looks.
  const ucs_status_ptr_t result = ucp_worker_flush_nbx(w->worker, &params);
  return Track(w, std::move(ticket), result, to, error);
}

int Test(GtrainUcxWorker* w, GtrainUcxTicket* ticket, GtrainUcxError* error) {
  if (ticket->status == UCS_INPROGRESS) return 0;
  const ucs_status_t status = ticket->status;
  w->open.erase(ticket);
  delete ticket;
  if (status == UCS_OK) return 1;
  Say(error, ucs_status_string(status));
  return -1;
}

int Progress(GtrainUcxWorker* w) {
  const int moved = static_cast<int>(ucp_worker_progress(w->worker));
  if (!w->closing.empty()) {
    std::erase_if(w->closing, [](void* request) {
      if (ucp_request_check_status(request) == UCS_INPROGRESS) return false;
      ucp_request_free(request);
      return true;
    });
  }
  return moved;
}

int Arm(GtrainUcxWorker* w) { return ucp_worker_arm(w->worker) == UCS_OK ? 1 : 0; }

int Descriptor(const GtrainUcxWorker* w) { return w->event_fd; }

// ------------------------------------------------------------------ the end

bool Idle(const GtrainUcxWorker* w) {
  for (const GtrainUcxTicket* ticket : w->open) {
    if (ticket->status == UCS_INPROGRESS) return false;
  }
  return true;
}

void CloseEndpoint(GtrainUcxWorker* w, GtrainUcxEndpoint* endpoint, bool force) {
  if (endpoint->endpoint == nullptr) return;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0;
  void* request = ucp_ep_close_nbx(endpoint->endpoint, &params);
  if (UCS_PTR_IS_PTR(request)) w->closing.push_back(request);
  endpoint->endpoint = nullptr;
}

void Drop(GtrainUcxWorker* w, GtrainUcxEndpoint* endpoint) { CloseEndpoint(w, endpoint, /*force=*/true); }

void Close(GtrainUcxWorker* w, int grace_ms) {
  w->heard = [](void*, const void*, size_t) {};
  const auto move_on = [w](int milliseconds, auto&& over) {
    const Clock::time_point end = Clock::now() + std::chrono::milliseconds(milliseconds);
    while (!over() && Clock::now() < end) {
      if (Progress(w) == 0 && Arm(w) == 1) {
        pollfd fd{w->event_fd, POLLIN, 0};
        poll(&fd, 1, 1);
      }
    }
  };
  if (grace_ms > 0) {
    for (auto& endpoint : w->endpoints)
      if (endpoint->failed == UCS_OK) CloseEndpoint(w, endpoint.get(), /*force=*/false);
    move_on(grace_ms, [w] { return w->closing.empty(); });
  }
  const std::vector<void*> unfinished = std::exchange(w->closing, {});  // peers that do not look
  for (auto& endpoint : w->endpoints) CloseEndpoint(w, endpoint.get(), /*force=*/true);
  move_on(kForcedCloseMs, [w] { return w->closing.empty() && Idle(w); });
  w->closing.insert(w->closing.end(), unfinished.begin(), unfinished.end());
  Destroy(w);
}

constexpr GtrainUcxApi kApi = {GTRAIN_UCX_ABI,
                               sizeof(GtrainUcxApi),
                               Open,
                               Address,
                               Connect,
                               Failed,
                               Send,
                               Flush,
                               Test,
                               Progress,
                               Arm,
                               Descriptor,
                               Drop,
                               Close};

}  // namespace

extern "C" __attribute__((visibility("default"))) const GtrainUcxApi* gtrain_ucx_api(void) { return &kApi; }
