//! Client of operations ports, for `meridian explain`, `meridian get requests` and `meridian log`.

use reqwest::{Client, RequestBuilder, Url};
use scheduler_api::requests::DISK_READ_MAX;
use serde_json::Value;
use std::time::Duration;

/// Timeout of a call. A gateway may read explanations from its disk, and responds within [`DISK_READ_MAX`].
const TIMEOUT: Duration = Duration::from_secs(10);

const _: () =
    assert!(TIMEOUT.as_millis() > DISK_READ_MAX.as_millis(), "the response says why there is no result");

/// Returns the URL of a path at the process that an option names; each segment is escaped.
pub(crate) fn url<'s>(
    option: &str,
    process: &str,
    segments: impl IntoIterator<Item = &'s str>,
) -> Result<Url, String> {
    let invalid =
        || format!("{option} {process} is not a URL; write http://HOST:PORT of the operations port");
    let mut url = Url::parse(process).map_err(|_| invalid())?;
    url.path_segments_mut().map_err(|()| invalid())?.pop_if_empty().extend(segments);
    Ok(url)
}

/// Returns the JSON of a response; the message of an error names the URL.
pub(crate) async fn get(url: Url) -> Result<Value, String> {
    let client = client()?;
    read(&url, client.get(url.clone())).await
}

/// Sends JSON, and returns that of the response; the message of an error names the URL.
pub(crate) async fn put(url: Url, body: &Value) -> Result<Value, String> {
    let client = client()?;
    read(&url, client.put(url.clone()).json(body)).await
}

fn client() -> Result<Client, String> {
    let client = Client::builder().no_proxy().timeout(TIMEOUT).build();
    client.map_err(|error| error.to_string())
}

async fn read(url: &Url, request: RequestBuilder) -> Result<Value, String> {
    let response = request.send().await.map_err(|error| format!("request to {url} failed: {error}"))?;
    let status = response.status();
    let body: Value =
        response.json().await.map_err(|error| format!("invalid response from {url}: {error}"))?;
    if status.is_success() {
        return Ok(body);
    }
    let error = &body["error"];
    let problem = error
        .as_str()
        .or_else(|| error["message"].as_str())
        .map_or_else(|| format!("status {status}"), str::to_owned);
    Err(format!("{url}: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_escaped() {
        let check = |gateway: &str, id: &str, expected: Option<&str>| {
            let url = url("--gateway", gateway, ["explain", id]);
            assert_eq!(url.ok().map(|url| url.to_string()).as_deref(), expected);
        };
        check("http://127.0.0.1:8081", "req-1", Some("http://127.0.0.1:8081/explain/req-1"));
        check("http://127.0.0.1:8081/", "a/b?c#d", Some("http://127.0.0.1:8081/explain/a%2Fb%3Fc%23d"));
        check("127.0.0.1:8081", "a", None);
        check("mailto:a", "a", None);
    }
}
