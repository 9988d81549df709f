//! Mock of an API server and its controllers, over real HTTP: lists and watches of pods with bookmarks, versions that
//! expire, the scale subresource with conflicts, and a controller that creates and deletes pods as Kubernetes's own do.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use supervision::{Mutex, MutexGuard};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, patch};
use axum::{Json, Router};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::super::workload::COST;
use crate::config::WorkloadKind;

/// A cluster with one workload, `replica-a`.
#[derive(Clone)]
pub(super) struct Cluster {
    state: Arc<Mutex<ClusterState>>,
    changed: Arc<Notify>,
    pub(super) url: String,
}

struct ClusterState {
    kind: WorkloadKind,
    version: u64,
    replicas: u32,
    scale_version: u64,
    pods: BTreeMap<String, Value>,
    created: u64,
    /// Events that a watch can still receive: version and line.
    history: Vec<(u64, Value)>,
    /// Versions before this one are compacted.
    compacted: u64,
    /// Watches that started before this version are closed.
    cut: u64,
    /// Number of further writes of the scale that conflict with another client.
    conflicts: u32,
    /// Received requests: method and path with the query.
    requests: Vec<String>,
    /// The same in full, the first of each method and path.
    recorded: BTreeMap<(String, String), Value>,
}

impl ClusterState {
    fn next(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    fn change(&mut self, kind: &str, name: &str) {
        let version = self.next();
        let pod = self.pods.get_mut(name).expect("there is such a pod");
        pod["metadata"]["resourceVersion"] = json!(version.to_string());
        let line = json!({"type": kind, "object": pod});
        self.history.push((version, line));
        if kind == "DELETED" {
            self.pods.remove(name);
        }
    }

    /// Creates and deletes pods, as the workload's controller does.
    fn control(&mut self) {
        while (self.pods.len() as u32) < self.replicas {
            let name = match self.kind {
                WorkloadKind::Deployment => format!("replica-a-{}", self.created),
                WorkloadKind::StatefulSet => format!("replica-a-{}", self.pods.len()),
            };
            self.created += 1;
            let uid = format!("uid-{}", self.created);
            let pod = json!({"metadata": {"name": name, "uid": uid, "annotations": {}},
                "status": {"phase": "Pending", "conditions": [{"type": "Ready", "status": "False"}]}});
            self.pods.insert(name.clone(), pod);
            self.change("ADDED", &name);
        }
        while self.pods.len() as u32 > self.replicas {
            let cost = |pod: &Value| -> i64 {
                pod["metadata"]["annotations"][COST].as_str().and_then(|cost| cost.parse().ok()).unwrap_or(0)
            };
            let gone = match self.kind {
                // The first one of equal cost.
                WorkloadKind::Deployment => self.pods.iter().min_by_key(|(_, pod)| cost(pod)),
                WorkloadKind::StatefulSet => self.pods.iter().next_back(),
            };
            let name = gone.expect("there are some").0.clone();
            self.change("DELETED", &name);
        }
    }
}

/// A cluster whose watches receive nothing yet.
pub(super) struct BatchedChanges<'a>(&'a mut ClusterState);

impl BatchedChanges<'_> {
    /// Deletes a pod and creates another one in its place.
    pub(super) fn evict(&mut self, name: &str) {
        self.0.change("DELETED", name);
        self.0.control();
    }

    /// Compacts the history up to now.
    pub(super) fn compact(&mut self) {
        self.0.compacted = self.0.next();
        self.0.history.clear();
    }
}

type Params = BTreeMap<String, String>;

impl Cluster {
    pub(super) async fn start(kind: WorkloadKind) -> Cluster {
        let state = ClusterState {
            kind,
            version: 10,
            replicas: 0,
            scale_version: 10,
            pods: BTreeMap::new(),
            created: 0,
            history: Vec::new(),
            compacted: 0,
            cut: 0,
            conflicts: 0,
            requests: Vec::new(),
            recorded: BTreeMap::new(),
        };
        let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", socket.local_addr().unwrap());
        let cluster = Cluster { state: Arc::new(Mutex::new(state)), changed: Arc::default(), url };
        let scale = format!("/apis/apps/v1/namespaces/meridian/{}/replica-a/scale", kind.plural());
        let router = Router::new()
            .route(&scale, get(read_scale).put(write_scale))
            .route("/api/v1/namespaces/meridian/pods", get(pods))
            .route("/api/v1/namespaces/meridian/pods/{name}", patch(patch_pod))
            .layer(middleware::from_fn_with_state(cluster.clone(), record))
            .with_state(cluster.clone());
        tokio::spawn(axum::serve(socket, router).into_future());
        cluster
    }

    fn inside(&self) -> MutexGuard<'_, ClusterState> {
        self.state.lock()
    }

    fn act<T>(&self, act: impl FnOnce(&mut ClusterState) -> T) -> T {
        let done = act(&mut self.inside());
        self.changed.notify_waiters();
        done
    }

    /// Scales to this number of pods, all of them ready, as another client.
    pub(super) fn has(&self, count: u32) {
        self.act(|inside| {
            inside.replicas = count;
            inside.scale_version = inside.next();
            inside.control();
        });
        self.names().iter().for_each(|name| self.becomes_ready(name));
    }

    /// Makes a pod ready.
    pub(super) fn becomes_ready(&self, name: &str) {
        self.act(|inside| {
            let pod = inside.pods.get_mut(name).expect("there is such a pod");
            pod["status"] = json!({"phase": "Running", "podIP": "10.0.0.9", "containerStatuses": [{"restartCount": 0}],
                "conditions": [{"type": "Ready", "status": "True"}]});
            inside.change("MODIFIED", name);
        });
    }

    /// Restarts a pod's container.
    pub(super) fn restarts(&self, name: &str) {
        self.act(|inside| {
            let pod = inside.pods.get_mut(name).expect("there is such a pod");
            pod["status"]["containerStatuses"][0]["restartCount"] = json!(1);
            inside.change("MODIFIED", name);
        });
    }

    /// Makes a pod wait before its first start, or after this number of restarts.
    pub(super) fn waits(&self, name: &str, reason: &str, restarts: u64) {
        self.act(|inside| {
            let pod = inside.pods.get_mut(name).expect("there is such a pod");
            let waiting = json!({"waiting": {"reason": reason, "message": "text of the kubelet"}});
            pod["status"] = json!({"phase": "Pending", "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": [{"restartCount": restarts, "state": waiting}]});
            inside.change("MODIFIED", name);
        });
    }

    /// Closes every watch.
    pub(super) fn cuts_watches(&self) {
        self.act(|inside| inside.cut = inside.next());
    }

    /// Makes this number of further writes of the scale conflict.
    pub(super) fn conflicts(&self, count: u32) {
        self.inside().conflicts = count;
    }

    /// Makes several changes at once: no watch receives the first before the last has happened.
    pub(super) fn batch(&self, act: impl FnOnce(&mut BatchedChanges<'_>)) {
        self.act(|inside| act(&mut BatchedChanges(inside)));
    }

    pub(super) fn uid(&self, name: &str) -> String {
        self.inside().pods[name]["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    /// Returns whether a request with this prefix was received since the last [`Cluster::take_requests`].
    pub(super) fn has_received(&self, prefix: &str) -> bool {
        self.inside().requests.iter().any(|request| request.starts_with(prefix))
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.inside().pods.keys().cloned().collect()
    }

    pub(super) fn replicas(&self) -> u32 {
        self.inside().replicas
    }

    /// Returns the first request of each method and path, with its body, without versions of objects.
    pub(super) fn recorded(&self) -> Vec<Value> {
        self.inside().recorded.values().cloned().collect()
    }

    /// Returns the requests since the last call.
    pub(super) fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.inside().requests)
    }
}

async fn record(State(cluster): State<Cluster>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let body = to_bytes(body, 1 << 20).await.unwrap();
    let method = head.method.to_string();
    let path = head.uri.path_and_query().unwrap().as_str();
    let path = match path.split_once("resourceVersion=") {
        Some((before, _)) => format!("{before}resourceVersion=1"),
        None => path.to_owned(),
    };
    let mut request = json!({"method": method, "path": path});
    if let Some(kind) = head.headers.get(CONTENT_TYPE) {
        let mut sent: Value = serde_json::from_slice(&body).unwrap();
        if let Some(version) = sent["metadata"].get_mut("resourceVersion") {
            *version = json!("1");
        }
        request["content_type"] = json!(kind.to_str().unwrap());
        request["body"] = sent;
    }
    cluster.inside().recorded.entry((path, method)).or_insert(request);
    next.run(Request::from_parts(head, Body::from(body))).await
}

fn rejected(status: StatusCode, message: &str) -> Response {
    let body = json!({"kind": "Status", "code": status.as_u16(), "message": message});
    (status, Json(body)).into_response()
}

async fn read_scale(State(cluster): State<Cluster>) -> Response {
    let mut inside = cluster.inside();
    inside.requests.push("GET scale".to_owned());
    let (replicas, version) = (inside.replicas, inside.scale_version.to_string());
    let metadata = json!({"name": "replica-a", "resourceVersion": version});
    let status = json!({"replicas": inside.pods.len(), "selector": "app=replica,deployment=a"});
    Json(json!({"kind": "Scale", "metadata": metadata, "spec": {"replicas": replicas}, "status": status}))
        .into_response()
}

async fn write_scale(State(cluster): State<Cluster>, Json(body): Json<Value>) -> Response {
    cluster.act(|inside| {
        inside.requests.push("PUT scale".to_owned());
        if inside.conflicts > 0 {
            inside.conflicts -= 1;
            inside.scale_version = inside.next();
        }
        if body["metadata"]["resourceVersion"] != json!(inside.scale_version.to_string()) {
            return rejected(StatusCode::CONFLICT, "the object has been modified");
        }
        inside.replicas = u32::try_from(body["spec"]["replicas"].as_u64().unwrap()).unwrap();
        inside.scale_version = inside.next();
        inside.control();
        Json(body).into_response()
    })
}

async fn patch_pod(State(cluster): State<Cluster>, Path(name): Path<String>, body: Bytes) -> Response {
    cluster.act(|inside| {
        inside.requests.push(format!("PATCH {name}"));
        let Some(pod) = inside.pods.get_mut(&name) else {
            return rejected(StatusCode::NOT_FOUND, "no such pod");
        };
        let patch: Value = serde_json::from_slice(&body).unwrap();
        if patch["metadata"]["uid"] != pod["metadata"]["uid"] {
            return rejected(StatusCode::CONFLICT, "another pod has its name");
        }
        pod["metadata"]["annotations"][COST] = patch["metadata"]["annotations"][COST].clone();
        let pod = pod.clone();
        inside.change("MODIFIED", &name);
        Json(pod).into_response()
    })
}

async fn pods(State(cluster): State<Cluster>, Query(query): Query<Params>) -> Response {
    assert_eq!(query["labelSelector"], "app=replica,deployment=a", "the workload's own selector");
    if !query.contains_key("watch") {
        let mut inside = cluster.inside();
        inside.requests.push("LIST".to_owned());
        let version = inside.version.to_string();
        let items: Vec<_> = inside.pods.values().cloned().collect();
        return Json(json!({"kind": "PodList", "metadata": {"resourceVersion": version}, "items": items}))
            .into_response();
    }
    let from: u64 = query["resourceVersion"].parse().unwrap();
    let began = {
        let mut inside = cluster.inside();
        inside.requests.push(format!("WATCH {from}"));
        if from < inside.compacted {
            return rejected(StatusCode::GONE, "too old resource version");
        }
        inside.version
    };
    Body::from_stream(stream::unfold((cluster, from, began, false), watched)).into_response()
}

/// Returns the next line of a watch, after the last sent version.
async fn watched(
    (cluster, sent, began, over): (Cluster, u64, u64, bool),
) -> Option<(Result<Bytes, Infallible>, (Cluster, u64, u64, bool))> {
    if over {
        return None;
    }
    loop {
        let changed = cluster.changed.clone();
        let changed = changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let line_to_send = {
            let inside = cluster.inside();
            if inside.cut > began {
                return None;
            }
            if sent < inside.compacted {
                let status = json!({"kind": "Status", "code": 410, "message": "too old resource version"});
                Some((json!({"type": "ERROR", "object": status}), sent, true))
            } else {
                let next = inside.history.iter().find(|(version, _)| *version > sent);
                // Without a change of these pods, a bookmark carries the current version.
                let bookmark = || {
                    let metadata = json!({"resourceVersion": inside.version.to_string()});
                    json!({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": metadata}})
                };
                match next {
                    Some((version, line)) => Some((line.clone(), *version, false)),
                    None if inside.version > sent => Some((bookmark(), inside.version, false)),
                    None => None,
                }
            }
        };
        if let Some((line, sent, over)) = line_to_send {
            return Some((Ok(Bytes::from(format!("{line}\n"))), (cluster, sent, began, over)));
        }
        changed.await;
    }
}
