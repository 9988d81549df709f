//! What a method and a path ask for.
//!
//! Everything that a model computes is forwarded; which paths those are is written here once, for the edge and for the
//! regions' doors. OpenAI's, Cohere's, Voyage's and Jina's requests name their model in the body. TEI's do not, since a TEI serves
//! one model; so any path may stand below `/deployments/{name}`, as Azure has it, and `…/deployments/{name}` is the base
//! URL to give to such a client.

/// Something that the edge serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint<'a> {
    /// Computed by a model, and forwarded to a region.
    Computed(Target<'a>),
    /// `GET /v1/models`, answered at the edge.
    Models,
    /// `GET /infinity/models`: the same list with the members that Infinity's client insists on.
    InfinityModels,
    /// `GET /v1/models/{id}`, answered at the edge.
    Model(&'a str),
    /// `GET /openapi.json`: the description of the API. It says nothing about tenants, so that no key is needed.
    OpenApi,
}

/// Where a forwarded request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target<'a> {
    /// The path as a replica serves it.
    pub path: &'static str,
    /// The deployment that the path names.
    pub deployment: Option<&'a str>,
    /// How the request names its deployment if the path does not.
    pub model: ModelField,
}

/// What is known of the field `model` at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelField {
    /// The body has it.
    Required,
    /// The body may have it; its ecosystem does not know it.
    Optional,
    /// There is no body.
    Bodiless,
}

use ModelField::{Bodiless, Optional, Required};

/// Why a method and a path are not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotServed {
    /// No such path.
    Path,
    /// The path is served with this other method.
    Method(&'static str),
}

/// Every path that a model computes something for.
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
    // The base URL itself, to which clients of TEI that were given a URL and no task post.
    ("POST", ROOT, Optional),
];

/// What the edge answers by itself. `{id}` stands for one path segment.
const AT_THE_EDGE: [(&str, &str); 4] =
    [("GET", "/v1/models"), ("GET", MODEL), ("GET", "/infinity/models"), ("GET", OPENAPI)];
const MODEL: &str = "/v1/models/{id}";
const MODEL_PREFIX: &str = "/v1/models/";
const OPENAPI: &str = "/openapi.json";
const ROOT: &str = "/";
const DEPLOYMENTS: &str = "/deployments/";

impl<'a> Endpoint<'a> {
    /// The endpoint behind a method and a path; a query string is no part of the path.
    pub fn of(method: &str, path: &'a str) -> Result<Endpoint<'a>, NotServed> {
        let (deployment, path) = split(path);
        let method = reading(method);
        if let Some(endpoint) = at_the_edge(path) {
            return if method == "GET" { Ok(endpoint) } else { Err(NotServed::Method("GET")) };
        }
        let found =
            COMPUTED.iter().find(|(_, served, _)| *served == path && (path != ROOT || deployment.is_some()));
        let (wanted, path, model) = *found.ok_or(NotServed::Path)?;
        if method == wanted {
            Ok(Endpoint::Computed(Target { path, deployment, model }))
        } else {
            Err(NotServed::Method(wanted))
        }
    }

    /// Every path that is served, as a replica has it; the same path with two methods comes once.
    pub fn paths() -> impl Iterator<Item = &'static str> {
        COMPUTED.iter().map(|(_, path, _)| *path).chain(AT_THE_EDGE.iter().map(|(_, path)| *path))
    }

    /// The path of this endpoint, as [`Endpoint::paths`] has it.
    pub fn path(&self) -> &'static str {
        match self {
            Endpoint::Computed(target) => target.path,
            Endpoint::Models => "/v1/models",
            Endpoint::InfinityModels => "/infinity/models",
            Endpoint::Model(_) => MODEL,
            Endpoint::OpenApi => OPENAPI,
        }
    }

    /// Every path that is computed, with what is known of its field `model`.
    pub fn computed() -> impl Iterator<Item = (&'static str, &'static str, ModelField)> {
        COMPUTED.iter().copied()
    }

    /// The paths that exist, for whoever asked for one that does not.
    pub fn served() -> impl Iterator<Item = String> {
        let computed =
            COMPUTED.iter().filter(|(_, path, _)| *path != ROOT).map(|(method, path, _)| (*method, *path));
        computed.chain(AT_THE_EDGE).map(|(method, path)| format!("{method} {path}"))
    }
}

/// What the edge answers by itself at this path.
fn at_the_edge(path: &str) -> Option<Endpoint<'_>> {
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

/// The deployment that a path names, and the rest of it.
fn split(path: &str) -> (Option<&str>, &str) {
    let Some(below) = path.strip_prefix(DEPLOYMENTS) else {
        return (None, path);
    };
    let (name, path) = below.split_at(below.find('/').unwrap_or(below.len()));
    (Some(name), if path.is_empty() { ROOT } else { path })
}

/// A path as a replica has it, served or not.
pub fn at_a_replica(path: &str) -> &str {
    split(path).1
}

/// Whether the model's engine computes the response at this path. What is looked up or tokenized says nothing of how long
/// the engine takes.
pub fn uses_engine(path: &str) -> bool {
    !matches!(path, "/info" | "/tokenize" | "/decode")
}

/// The path of a request that an edge sent, if it is one for a replica.
pub fn for_a_replica(method: &str, path: &str) -> Option<&'static str> {
    let method = reading(method);
    let computed = COMPUTED.iter().find(|(wanted, served, _)| *wanted == method && *served == path);
    computed.map(|(_, path, _)| *path)
}

/// Whoever may have an answer may have its head alone (RFC 9110, 9.3.2).
fn reading(method: &str) -> &str {
    if method == "HEAD" { "GET" } else { method }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_served_with_its_own_method_only() {
        let check =
            |method, path, expected| assert_eq!(Endpoint::of(method, path), expected, "{method} {path}");
        let computed = |path, deployment, model| Ok(Endpoint::Computed(Target { path, deployment, model }));
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
    fn what_an_edge_sends_on_is_what_a_region_takes() {
        for (method, path, _) in COMPUTED {
            assert_eq!(for_a_replica(method, path), Some(path));
        }
        assert_eq!(for_a_replica("GET", "/v1/models"), None);
        assert_eq!(for_a_replica("GET", "/embed"), None);
    }

    #[test]
    fn every_endpoint_has_a_path_that_is_listed() {
        let paths: Vec<_> = Endpoint::paths().collect();
        for asked in ["/v1/models", "/v1/models/a", "/infinity/models", "/openapi.json"] {
            let endpoint = Endpoint::of("GET", asked).expect(asked);
            assert!(paths.contains(&endpoint.path()), "{asked}");
        }
    }

    #[test]
    fn whoever_asks_for_nothing_is_told_of_everything() {
        let served: Vec<String> = Endpoint::served().collect();
        assert_eq!(served.len(), COMPUTED.len() - 1 + AT_THE_EDGE.len(), "all but the root");
        assert!(
            served.contains(&"POST /v1/rerank".to_owned()) && served.contains(&"GET /v1/models".to_owned())
        );
    }
}
