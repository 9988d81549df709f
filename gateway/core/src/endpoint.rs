//! What a method and a path ask for.

/// Something that the edge serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `POST /v1/embeddings`, forwarded to a region.
    Embeddings,
    /// `GET /v1/models`, answered at the edge.
    Models,
}

/// Why a method and a path are not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotServed {
    /// No such path.
    Path,
    /// The path is served with this other method.
    Method(&'static str),
}

/// Every path that the edge serves, with its method.
const SERVED: [(&str, &str, Endpoint); 2] =
    [("/v1/embeddings", "POST", Endpoint::Embeddings), ("/v1/models", "GET", Endpoint::Models)];

impl Endpoint {
    /// The endpoint behind a method and a path; a query string is no part of the path.
    pub fn of(method: &str, path: &str) -> Result<Endpoint, NotServed> {
        let (_, wanted, endpoint) =
            SERVED.iter().find(|(served, _, _)| *served == path).ok_or(NotServed::Path)?;
        if method == *wanted { Ok(*endpoint) } else { Err(NotServed::Method(wanted)) }
    }

    /// The paths that exist, for whoever asked for one that does not.
    pub fn served() -> impl Iterator<Item = String> {
        SERVED.iter().map(|(path, method, _)| format!("{method} {path}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_served_with_its_own_method_only() {
        let check =
            |method, path, expected| assert_eq!(Endpoint::of(method, path), expected, "{method} {path}");
        check("POST", "/v1/embeddings", Ok(Endpoint::Embeddings));
        check("GET", "/v1/models", Ok(Endpoint::Models));
        check("GET", "/v1/embeddings", Err(NotServed::Method("POST")));
        check("POST", "/v1/embeddings/", Err(NotServed::Path));
        check("POST", "/", Err(NotServed::Path));
    }
}
