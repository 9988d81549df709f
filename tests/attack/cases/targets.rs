//! Request targets (RFC 9112, 3.2; RFC 3986).

use super::shown;
use crate::case::{Case, line};

pub(super) fn cases() -> Vec<Case> {
    const NONE: &[u16] = &[400, 404];
    let long = |bytes: usize| format!("/{}", "x".repeat(bytes - 1));
    let below = format!("/deployments/{}/embed", "x".repeat(5_000));
    let (at_limit, past_limit) = (long(8 << 10), long((8 << 10) + 1));
    let cases: Vec<(&str, &str, &'static [u16])> = vec![
        ("GET", "/v1/models", &[200]),
        ("GET", "/v1/models?", &[200]),
        ("GET", "/v1/models?a=b&a=%00", &[200, 400]),
        // Proxies send these, and a server must accept them (RFC 9112, 3.2.2).
        ("GET", "http://x/v1/models", &[200]),
        ("GET", "HTTP://x/v1/models", &[200]),
        ("GET", "http://y/v1/models", &[200, 400, 421]),
        ("GET", "http://x:80/v1/models", &[200, 400, 421]),
        ("GET", "https://x/v1/models", &[200, 400, 421]),
        ("GET", "http://x", NONE),
        ("GET", "http://", NONE),
        ("GET", "http:///v1/models", NONE),
        ("GET", "http:/v1/models", NONE),
        ("GET", "http://user@x/v1/models", &[200, 400, 404, 421]),
        ("GET", "http://x:99999/v1/models", &[400, 404, 421]),
        ("GET", "http://[::1/v1/models", NONE),
        ("GET", "ftp://x/v1/models", NONE),
        ("GET", "file:///etc/passwd", NONE),
        ("GET", "gopher://x/", NONE),
        ("GET", "x:80", NONE),
        ("GET", "x", NONE),
        ("GET", "*", NONE),
        ("GET", "*/v1/models", NONE),
        ("GET", "?/v1/models", NONE),
        ("GET", "#/v1/models", NONE),
        ("GET", "\\v1\\models", NONE),
        ("GET", "//v1/models", NONE),
        ("GET", "///", NONE),
        ("GET", "/v1/models/", NONE),
        ("GET", "/v1//models", NONE),
        ("GET", "/V1/models", NONE),
        ("GET", "/v1/models;a=b", NONE),
        ("GET", "/v1/models#x", &[200, 400, 404]),
        ("GET", "/v1/../v1/models", NONE),
        ("GET", "/../../etc/passwd", NONE),
        ("GET", "/v1/./models", NONE),
        ("GET", "/v1/%2e%2e/v1/models", NONE),
        ("GET", "/v1%2fmodels", NONE),
        ("GET", "/v1/model%73", &[200, 400, 404]),
        ("GET", "/v1/models%00", NONE),
        ("GET", "/v1/models%0d%0aX:y", NONE),
        ("GET", "/v1/models%", NONE),
        ("GET", "/v1/models%zz", NONE),
        ("GET", "/%c0%ae%c0%ae/", NONE),
        ("GET", "/metrics", NONE),
        ("GET", "/readyz", NONE),
        ("GET", "/livez", NONE),
        ("GET", "/routes", NONE),
        ("GET", "/explain/x", NONE),
        ("GET", "/spoke/v1/exchange", &[400, 404, 405]),
        ("POST", "/spoke/v1/exchange", &[400, 404, 405]),
        ("GET", "/status", NONE),
        ("POST", "/slow?times=1000", NONE),
        ("GET", "/v1/routes", NONE),
        ("POST", "/v1/spokes", NONE),
        ("DELETE", "/v1/leases/1", NONE),
        ("GET", "/deployments", NONE),
        ("GET", "/deployments/", &[400, 404, 405]),
        ("GET", "/deployments//info", NONE),
        ("GET", "/deployments/nowhere/info", NONE),
        ("GET", "/deployments/anywhere/../anywhere/info", NONE),
        ("GET", "/deployments/%61nywhere/info", &[200, 400, 404]),
        ("GET", "/deployments/anywhere%2finfo", &[400, 404, 405]),
        ("GET", "/deployments/anywhere/metrics", NONE),
        ("GET", "/deployments/anywhere/status", NONE),
        ("GET", "/deployments/anywhere/deployments/anywhere/info", NONE),
        ("GET", "/deployments/anywhere/info?x=%", &[200, 400]),
        ("GET", "/deployments/{}$^|`/info", NONE),
        ("POST", &below, &[400, 404, 422]),
        ("GET", &at_limit, &[404]),
        ("GET", &past_limit, &[414, 431]),
        ("CONNECT", "x:80", &[400, 404, 405, 501]),
        ("CONNECT", "/v1/models", &[400, 404, 405, 501]),
        ("CONNECT", "127.0.0.1:22", &[400, 404, 405, 501]),
    ];
    cases
        .into_iter()
        .map(|(method, target, statuses)| {
            let bytes = line(&format!("{method} {target} HTTP/1.1"));
            Case::h1(format!("target {method} {}", shown(target)), bytes, &[statuses])
        })
        .collect()
}
