//! The paths of the API as a closed set, so that a stranger who tries paths makes no new time series.

/// Where a request went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Route(&'static str);

/// Every path that computes or explains something. Others are `other`.
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

impl Route {
    /// The route of a path.
    pub(crate) fn of(path: &str) -> Route {
        Route(PATHS.iter().find(|known| **known == path).copied().unwrap_or("other"))
    }

    /// As metrics call it.
    pub(crate) fn as_str(self) -> &'static str {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_nobody_serves_makes_no_label() {
        assert_eq!(Route::of("/v1/embeddings").as_str(), "/v1/embeddings");
        for strange in ["/v1/embeddings/", "/../etc", "/x\"} 1\n", ""] {
            assert_eq!(Route::of(strange).as_str(), "other", "{strange:?}");
        }
    }
}
