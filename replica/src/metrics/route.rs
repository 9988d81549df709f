//! API paths as a closed set, so that requests to unknown paths create no time series.

/// Route of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RouteLabel(&'static str);

/// Paths with a label of their own; all others are `other`.
const PATHS: &[&str] = &[
    "/v1/embeddings",
    "/v1/models",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/embed",
    "/v2/embed",
    "/voyage/v1/embeddings",
    "/voyage/v1/rerank",
    "/infinity/embeddings",
    "/infinity/rerank",
    "/infinity/classify",
    "/pooling",
    "/v1/pooling",
    "/v1/score",
    "/v1/classify",
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/rerank",
    "/predict",
    "/predict_tokens",
    "/similarity",
    "/tokenize",
    "/decode",
    "/score",
    "/classify",
    "/embeddings",
];

impl RouteLabel {
    /// Returns the route of a path.
    pub(crate) fn of(path: &str) -> RouteLabel {
        RouteLabel(PATHS.iter().find(|known| **known == path).copied().unwrap_or("other"))
    }

    /// Returns the value of the label.
    pub(crate) fn as_str(self) -> &'static str {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_path_creates_no_label() {
        assert_eq!(RouteLabel::of("/v1/embeddings").as_str(), "/v1/embeddings");
        for unknown in ["/v1/embeddings/", "/../etc", "/x\"} 1\n", ""] {
            assert_eq!(RouteLabel::of(unknown).as_str(), "other", "{unknown:?}");
        }
    }
}
