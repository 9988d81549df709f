//! URL and API key of an endpoint, as for an OpenAI client.

use http::{HeaderValue, Uri};

/// Parses the URL of an API, with or without `/v1`; returns it with the path before `/v1`. `field` names the option in errors.
pub(crate) fn parse_url(field: &str, url: &str) -> Result<(Uri, String), String> {
    let wrong = |what: &str| format!("{field} {url:?}: {what}; write it like http://127.0.0.1:8080");
    let uri: Uri = url.parse().map_err(|_| wrong("is not a URL"))?;
    match uri.scheme_str() {
        Some("http" | "https") => {}
        Some(_) => return Err(wrong("must have the scheme http or https")),
        None => return Err(wrong("has no scheme")),
    }
    let authority = uri.authority().filter(|authority| !authority.host().is_empty());
    if authority.ok_or_else(|| wrong("has no host"))?.as_str().contains('@') {
        return Err(format!(
            "{field}: contains a user or a password (not shown); pass the API key separately"
        ));
    }
    if uri.query().is_some() {
        return Err(wrong("contains a query"));
    }
    let path = uri.path().trim_end_matches('/');
    let path = path.strip_suffix("/v1").unwrap_or(path).to_owned();
    Ok((uri, path))
}

/// Returns the value of `authorization` for an API key, marked sensitive so that it is never printed.
pub(crate) fn authorization(field: &str, key: &str) -> Result<HeaderValue, String> {
    if key.trim().is_empty() {
        return Err(format!("{field}: is empty; omit it to send no API key"));
    }
    let mut value = HeaderValue::try_from(format!("Bearer {}", key.trim())).map_err(|_| {
        format!("{field}: contains characters that are invalid in a header (value not shown)")
    })?;
    value.set_sensitive(true);
    Ok(value)
}
