//! Endpoints: mapping of a method and a path.
//!
//! Everything that a model computes is forwarded, by the table of the API ([`replica_api::api`]). Requests of OpenAI,
//! Cohere, Voyage and Jina name their model in the body. TEI's do not, since a TEI serves one model; so any path may be
//! prefixed with `/deployments/{name}`, as in Azure, and `…/deployments/{name}` is the base URL for such a client. Some
//! APIs have the name inside the path.

pub use replica_api::api::ModelField;
use replica_api::api::{ApiOperation, OPERATIONS};
use replica_api::batches::{BATCH_ENDPOINTS, BatchCall, NoBatchCall};
use replica_api::jobs::{JOBS, JobKind, WEBHOOK};
use replica_api::paths::{INFINITY_MODELS, MODEL, MODELS, OPENAPI};

/// Endpoint of the edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint<'a> {
    /// Computed by a model, and forwarded to a region.
    Computed(ForwardTarget<'a>),
    /// `GET /v1/models`, served by the edge.
    Models,
    /// `GET /infinity/models`: the same list with the members that Infinity's client requires.
    InfinityModels,
    /// `GET /v1/models/{id}`, served by the edge.
    Model(&'a str),
    /// `GET /v1/async`: the jobs of the tenant.
    Jobs,
    /// `GET /v1/async/{id}`: a job.
    Job(&'a str),
    /// `DELETE /v1/async/{id}`: cancels a job.
    CancelJob(&'a str),
    /// `POST /v1/async/{id}/webhook`: sends the result of a job to its webhook again.
    ResendWebhook(&'a str),
    /// A file or a batch.
    Batch(BatchCall<'a>),
    /// `GET /openapi.json`: the description of the API. It contains nothing about tenants, so that no key is needed.
    OpenApi,
}

/// Target of a forwarded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardTarget<'a> {
    /// Path as served by a replica.
    pub path: &'static str,
    /// Deployment in the path.
    pub deployment: Option<&'a str>,
    /// Field that names the deployment if the path does not.
    pub model: ModelField,
}

/// Reason why a method and a path are not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotServed {
    /// No such path.
    Path,
    /// The path is served with this other method.
    Method(&'static str),
}

/// Paths that the edge serves itself. `{id}` stands for one path segment.
const EDGE_ENDPOINTS: [(&str, &str); 8] = [
    ("GET", MODELS),
    ("GET", MODEL),
    ("GET", INFINITY_MODELS),
    ("GET", OPENAPI),
    ("GET", JOBS),
    ("GET", JOB),
    ("DELETE", JOB),
    ("POST", JOB_WEBHOOK),
];
const JOB: &str = "/v1/async/{id}";
const JOB_WEBHOOK: &str = "/v1/async/{id}/webhook";
const ROOT: &str = "/";
const DEPLOYMENTS: &str = "/deployments/";

impl<'a> Endpoint<'a> {
    /// Returns the endpoint of a method and a path without its query string.
    pub fn of(method: &str, path: &'a str) -> Result<Endpoint<'a>, NotServed> {
        let (deployment, path) = split(path);
        let method = normalized_method(method);
        if let Some(endpoint) = edge_endpoint(path) {
            return if method == "GET" { Ok(endpoint) } else { Err(NotServed::Method("GET")) };
        }
        if let Some(kind) = JobKind::at(path) {
            let ApiOperation { method: served, model, .. } =
                *ApiOperation::at(kind.computed_path()).ok_or(NotServed::Path)?;
            let target = ForwardTarget { path: kind.path(), deployment, model };
            return if method == served {
                Ok(Endpoint::Computed(target))
            } else {
                Err(NotServed::Method(served))
            };
        }
        if let Some(below) =
            path.strip_prefix(JOBS).filter(|below| below.is_empty() || below.starts_with('/'))
        {
            return match (method, below.trim_start_matches('/')) {
                ("GET", "") if below.is_empty() => Ok(Endpoint::Jobs),
                (_, "") if below.is_empty() => Err(NotServed::Method("GET")),
                (method, id) if let Some(id) = id.strip_suffix(WEBHOOK).filter(|id| is_segment(id)) => {
                    match method {
                        "POST" => Ok(Endpoint::ResendWebhook(id)),
                        _ => Err(NotServed::Method("POST")),
                    }
                }
                (_, id) if !is_segment(id) => Err(NotServed::Path),
                ("GET", id) => Ok(Endpoint::Job(id)),
                ("DELETE", id) => Ok(Endpoint::CancelJob(id)),
                _ => Err(NotServed::Method("GET, DELETE")),
            };
        }
        if let Some(call) = BatchCall::of(method, path) {
            return call.map(Endpoint::Batch).map_err(|problem| match problem {
                NoBatchCall::Path => NotServed::Path,
                NoBatchCall::Method(methods) => NotServed::Method(methods),
            });
        }
        let operation = ApiOperation::at(path).filter(|_| path != ROOT || deployment.is_some());
        let operation = operation.ok_or(NotServed::Path)?;
        if method == operation.method {
            let ApiOperation { path, model, .. } = *operation;
            Ok(Endpoint::Computed(ForwardTarget { path, deployment, model }))
        } else {
            Err(NotServed::Method(operation.method))
        }
    }

    /// Returns every served path, as a replica has it.
    pub fn paths() -> impl Iterator<Item = &'static str> {
        let jobs = JobKind::ALL.into_iter().map(JobKind::path);
        let edge = EDGE_ENDPOINTS.iter().filter(|(method, _)| *method != "DELETE").map(|(_, path)| *path);
        let mut batches: Vec<_> = BATCH_ENDPOINTS.iter().map(|(_, path)| *path).collect();
        batches.dedup();
        OPERATIONS.iter().map(|operation| operation.path).chain(jobs).chain(edge).chain(batches)
    }

    /// Returns the path of this endpoint, as in [`Endpoint::paths`].
    pub fn path(&self) -> &'static str {
        match self {
            Endpoint::Computed(target) => target.path,
            Endpoint::Models => MODELS,
            Endpoint::InfinityModels => INFINITY_MODELS,
            Endpoint::Model(_) => MODEL,
            Endpoint::OpenApi => OPENAPI,
            Endpoint::Jobs => JOBS,
            Endpoint::Job(_) | Endpoint::CancelJob(_) => JOB,
            Endpoint::ResendWebhook(_) => JOB_WEBHOOK,
            Endpoint::Batch(call) => call.path(),
        }
    }

    /// Returns the served endpoints, for the error about an unknown one.
    pub fn served() -> impl Iterator<Item = String> {
        let computed = OPERATIONS.iter().filter(|operation| operation.path != ROOT);
        let computed = computed.map(|operation| format!("{} {}", operation.method, operation.public_path()));
        let jobs = JobKind::ALL.into_iter().map(|kind| format!("POST {}", kind.path()));
        let others = EDGE_ENDPOINTS.iter().chain(&BATCH_ENDPOINTS);
        computed.chain(jobs).chain(others.map(|(method, path)| format!("{method} {path}")))
    }
}

/// Returns whether a text is one segment of a path.
fn is_segment(text: &str) -> bool {
    !text.is_empty() && !text.contains('/')
}

/// Returns the endpoint that the edge serves itself at this path.
fn edge_endpoint(path: &str) -> Option<Endpoint<'_>> {
    match path {
        MODELS => Some(Endpoint::Models),
        INFINITY_MODELS => Some(Endpoint::InfinityModels),
        OPENAPI => Some(Endpoint::OpenApi),
        path => {
            let id = path.strip_prefix(MODELS)?.strip_prefix('/')?;
            (!id.is_empty() && !id.contains('/')).then_some(Endpoint::Model(id))
        }
    }
}

/// Splits a path into its deployment and the path at a replica.
fn split(path: &str) -> (Option<&str>, &str) {
    if let Some(below) = path.strip_prefix(DEPLOYMENTS) {
        let (name, path) = below.split_at(below.find('/').unwrap_or(below.len()));
        return (Some(name), if path.is_empty() { ROOT } else { path });
    }
    let inside = |operation: &ApiOperation| {
        let (before, after) = operation.deployment_path?;
        let name = path.strip_prefix(before)?.strip_suffix(after)?;
        (!name.is_empty() && !name.contains('/')).then_some((Some(name), operation.path))
    };
    OPERATIONS.iter().find_map(inside).unwrap_or((None, path))
}

/// Returns a path as a replica has it, served or not.
pub fn replica_path(path: &str) -> &str {
    split(path).1
}

/// Returns whether a request at this path becomes a job.
pub fn is_job(path: &str) -> bool {
    JobKind::at(path).is_some()
}

/// Returns whether the model's engine computes the response at this path of a replica. That of a job is its acceptance.
pub fn uses_engine(path: &str) -> bool {
    !is_job(path) && ApiOperation::at(path).is_none_or(|operation| operation.uses_engine)
}

/// Returns the replica's path of a request from an edge, if a replica serves it.
pub fn replica_endpoint(method: &str, path: &str) -> Option<&'static str> {
    let operation = ApiOperation::at(path)?;
    (operation.method == normalized_method(method)).then_some(operation.path)
}

/// Maps HEAD to GET (RFC 9110, 9.3.2).
fn normalized_method(method: &str) -> &str {
    if method == "HEAD" { "GET" } else { method }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ModelField::{Bodiless, Optional, Required};

    #[test]
    fn a_path_is_served_with_its_own_method_only() {
        let check =
            |method, path, expected| assert_eq!(Endpoint::of(method, path), expected, "{method} {path}");
        let computed =
            |path, deployment, model| Ok(Endpoint::Computed(ForwardTarget { path, deployment, model }));
        check("POST", "/v1/embeddings", computed("/v1/embeddings", None, Required));
        check("HEAD", "/v1/models", Ok(Endpoint::Models));
        check("HEAD", "/v1/embeddings", Err(NotServed::Method("POST")));
        check("POST", "/embed", computed("/embed", None, Optional));
        check("POST", "/deployments/a/embed", computed("/embed", Some("a"), Optional));
        check("POST", "/deployments/a/v1/embeddings", computed("/v1/embeddings", Some("a"), Required));
        check("POST", "/deployments/a", computed("/", Some("a"), Optional));
        check("POST", "/deployments/a/", computed("/", Some("a"), Optional));
        check("GET", "/deployments/a/info", computed("/info", Some("a"), Bodiless));
        check("GET", "/deployments/a/v1/models", Ok(Endpoint::Models));
        check("GET", "/v1/models", Ok(Endpoint::Models));
        check("POST", "/v1/models", Err(NotServed::Method("GET")));
        check("GET", "/v1/models/a", Ok(Endpoint::Model("a")));
        check("DELETE", "/v1/models/a", Err(NotServed::Method("GET")));
        check("GET", "/v1/models/", Err(NotServed::Path));
        check("GET", "/v1/models/a/b", Err(NotServed::Path));
        check("GET", "/infinity/models", Ok(Endpoint::InfinityModels));
        check("GET", "/openapi.json", Ok(Endpoint::OpenApi));
        check("POST", "/v2/embed", computed("/v2/embed", None, Required));
        check("POST", "/voyage/v1/rerank", computed("/voyage/v1/rerank", None, Required));
        check("GET", "/v1/embeddings", Err(NotServed::Method("POST")));
        check("POST", "/v1/embeddings/", Err(NotServed::Path));
        check("POST", "/deployments/a/b/embed", Err(NotServed::Path));
        check("POST", "/", Err(NotServed::Path));
        check("POST", "/bedrock/model/a/invoke", computed("/bedrock/invoke", Some("a"), Optional));
        check("GET", "/bedrock/model/a/invoke", Err(NotServed::Method("POST")));
        check("POST", "/bedrock/model//invoke", Err(NotServed::Path));
        check("POST", "/v1/async/embeddings", computed("/v1/async/embeddings", None, Required));
        check("POST", "/deployments/a/v1/async/predict", computed("/v1/async/predict", Some("a"), Optional));
        check("GET", "/v1/async/embeddings", Err(NotServed::Method("POST")));
        check("GET", "/v1/async", Ok(Endpoint::Jobs));
        check("DELETE", "/v1/async", Err(NotServed::Method("GET")));
        check("GET", "/v1/async/", Err(NotServed::Path));
        check("GET", "/v1/asyncs", Err(NotServed::Path));
        check("HEAD", "/v1/async/job_1", Ok(Endpoint::Job("job_1")));
        check("DELETE", "/v1/async/job_1", Ok(Endpoint::CancelJob("job_1")));
        check("POST", "/v1/async/job_1", Err(NotServed::Method("GET, DELETE")));
        check("POST", "/v1/async/job_1/webhook", Ok(Endpoint::ResendWebhook("job_1")));
        check("GET", "/v1/async/job_1/webhook", Err(NotServed::Method("POST")));
        for path in ["/v1/async/webhook/", "/v1/async/a/b/webhook"] {
            check("POST", path, Err(NotServed::Path));
        }
        check("GET", "/v1/async/a/b", Err(NotServed::Path));
        check("POST", "/v1/files", Ok(Endpoint::Batch(BatchCall::Upload)));
        check("HEAD", "/v1/batches/b", Ok(Endpoint::Batch(BatchCall::Batch("b"))));
        check("PUT", "/v1/batches", Err(NotServed::Method("POST, GET")));
        check("POST", "/bedrock/model/a/b/invoke", Err(NotServed::Path));
        check("POST", "/bedrock/model/a/converse", Err(NotServed::Path));
    }

    #[test]
    fn a_region_serves_what_an_edge_forwards() {
        for ApiOperation { method, path, .. } in OPERATIONS {
            assert_eq!(replica_endpoint(method, path), Some(*path));
        }
        assert_eq!(replica_endpoint("GET", "/v1/models"), None);
        assert_eq!(replica_endpoint("GET", "/embed"), None);
    }

    #[test]
    fn every_endpoint_has_a_path_that_is_listed() {
        let paths: Vec<_> = Endpoint::paths().collect();
        for path in ["/v1/models", "/v1/models/a", "/infinity/models", "/openapi.json"] {
            let endpoint = Endpoint::of("GET", path).expect(path);
            assert!(paths.contains(&endpoint.path()), "{path}");
        }
    }

    #[test]
    fn all_endpoints_are_listed() {
        let served: Vec<String> = Endpoint::served().collect();
        let all = OPERATIONS.len() - 1 + JobKind::ALL.len() + EDGE_ENDPOINTS.len() + BATCH_ENDPOINTS.len();
        assert_eq!(served.len(), all, "all but the root");
        assert!(
            served.contains(&"POST /v1/rerank".to_owned()) && served.contains(&"GET /v1/models".to_owned())
        );
    }
}
