//! Endpoints: mapping of a method and a path.
//!
//! Everything that a model computes is forwarded; the list of those paths exists once, for the edge and for the
//! regions' ingresses. Requests of OpenAI, Cohere, Voyage and Jina name their model in the body. TEI's do not, since a
//! TEI serves one model; so any path may be prefixed with `/deployments/{name}`, as in Azure, and
//! `…/deployments/{name}` is the base URL for such a client.

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

/// Presence of the field `model` at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelField {
    /// The body must have it.
    Required,
    /// The body may have it; the API itself does not define it.
    Optional,
    /// There is no body.
    Bodiless,
}

use ModelField::{Bodiless, Optional, Required};

/// Reason why a method and a path are not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotServed {
    /// No such path.
    Path,
    /// The path is served with this other method.
    Method(&'static str),
}

/// Paths that a model computes.
const COMPUTED: [(&str, &str, ModelField); 25] = [
    ("POST", "/v1/embeddings", Required),
    ("POST", "/v1/embed", Required),
    ("POST", "/v2/embed", Required),
    ("POST", "/v1/rerank", Required),
    ("POST", "/v2/rerank", Required),
    ("POST", "/voyage/v1/embeddings", Required),
    ("POST", "/voyage/v1/rerank", Required),
    ("POST", "/infinity/embeddings", Required),
    ("POST", "/infinity/rerank", Required),
    ("POST", "/infinity/classify", Required),
    ("POST", "/pooling", Required),
    ("POST", "/v1/pooling", Required),
    ("POST", "/score", Required),
    ("POST", "/v1/score", Required),
    ("POST", "/classify", Required),
    ("POST", "/v1/classify", Required),
    ("POST", "/embed", Optional),
    ("POST", "/embed_all", Optional),
    ("POST", "/rerank", Optional),
    ("POST", "/predict", Optional),
    ("POST", "/similarity", Optional),
    ("POST", "/tokenize", Optional),
    ("POST", "/decode", Optional),
    ("GET", "/info", Bodiless),
    // The base URL itself, used by TEI clients that were given a URL and no task.
    ("POST", ROOT, Optional),
];

/// Paths that the edge serves itself. `{id}` stands for one path segment.
const EDGE_ENDPOINTS: [(&str, &str); 4] =
    [("GET", "/v1/models"), ("GET", MODEL), ("GET", "/infinity/models"), ("GET", OPENAPI)];
const MODEL: &str = "/v1/models/{id}";
const MODEL_PREFIX: &str = "/v1/models/";
const OPENAPI: &str = "/openapi.json";
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
        let endpoint =
            COMPUTED.iter().find(|(_, served, _)| *served == path && (path != ROOT || deployment.is_some()));
        let (expected_method, path, model) = *endpoint.ok_or(NotServed::Path)?;
        if method == expected_method {
            Ok(Endpoint::Computed(ForwardTarget { path, deployment, model }))
        } else {
            Err(NotServed::Method(expected_method))
        }
    }

    /// Returns every served path, as a replica has it; a path with two methods is listed once.
    pub fn paths() -> impl Iterator<Item = &'static str> {
        COMPUTED.iter().map(|(_, path, _)| *path).chain(EDGE_ENDPOINTS.iter().map(|(_, path)| *path))
    }

    /// Returns the path of this endpoint, as in [`Endpoint::paths`].
    pub fn path(&self) -> &'static str {
        match self {
            Endpoint::Computed(target) => target.path,
            Endpoint::Models => "/v1/models",
            Endpoint::InfinityModels => "/infinity/models",
            Endpoint::Model(_) => MODEL,
            Endpoint::OpenApi => OPENAPI,
        }
    }

    /// Returns every computed path, with its method and its field `model`.
    pub fn computed() -> impl Iterator<Item = (&'static str, &'static str, ModelField)> {
        COMPUTED.iter().copied()
    }

    /// Returns the served endpoints, for the error about an unknown one.
    pub fn served() -> impl Iterator<Item = String> {
        let computed =
            COMPUTED.iter().filter(|(_, path, _)| *path != ROOT).map(|(method, path, _)| (*method, *path));
        computed.chain(EDGE_ENDPOINTS).map(|(method, path)| format!("{method} {path}"))
    }
}

/// Returns the endpoint that the edge serves itself at this path.
fn edge_endpoint(path: &str) -> Option<Endpoint<'_>> {
    match path {
        "/v1/models" => Some(Endpoint::Models),
        "/infinity/models" => Some(Endpoint::InfinityModels),
        OPENAPI => Some(Endpoint::OpenApi),
        path => {
            let id = path.strip_prefix(MODEL_PREFIX)?;
            (!id.is_empty() && !id.contains('/')).then_some(Endpoint::Model(id))
        }
    }
}

/// Splits a path into its deployment and the rest.
fn split(path: &str) -> (Option<&str>, &str) {
    let Some(below) = path.strip_prefix(DEPLOYMENTS) else {
        return (None, path);
    };
    let (name, path) = below.split_at(below.find('/').unwrap_or(below.len()));
    (Some(name), if path.is_empty() { ROOT } else { path })
}

/// Returns a path as a replica has it, served or not.
pub fn replica_path(path: &str) -> &str {
    split(path).1
}

/// Returns whether the model's engine computes the response at this path. The latency of the others says nothing about
/// that of the engine.
pub fn uses_engine(path: &str) -> bool {
    !matches!(path, "/info" | "/tokenize" | "/decode")
}

/// Returns the replica's path of a request from an edge, if a replica serves it.
pub fn replica_endpoint(method: &str, path: &str) -> Option<&'static str> {
    let method = normalized_method(method);
    let computed =
        COMPUTED.iter().find(|(expected_method, served, _)| *expected_method == method && *served == path);
    computed.map(|(_, path, _)| *path)
}

/// Maps HEAD to GET (RFC 9110, 9.3.2).
fn normalized_method(method: &str) -> &str {
    if method == "HEAD" { "GET" } else { method }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    }

    #[test]
    fn a_region_serves_what_an_edge_forwards() {
        for (method, path, _) in COMPUTED {
            assert_eq!(replica_endpoint(method, path), Some(path));
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
        assert_eq!(served.len(), COMPUTED.len() - 1 + EDGE_ENDPOINTS.len(), "all but the root");
        assert!(
            served.contains(&"POST /v1/rerank".to_owned()) && served.contains(&"GET /v1/models".to_owned())
        );
    }
}
