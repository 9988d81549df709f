//! `meridian health`: requests a health path, for container images without a shell.

use crate::cli::HealthOptions;
use crate::{EXIT_FAILED, EXIT_USAGE, fail};
use reqwest::StatusCode;
use std::process::ExitCode;
use std::time::Duration;

/// Timeout of the request. A process responds within 0.8 s, also if its locks are stuck.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum bytes of a response in the error message.
const REASON_BYTES_MAX: usize = 512;

/// Runs the command. Exit code 1 unless the response is 200.
pub(crate) fn main(options: &HealthOptions) -> ExitCode {
    let url = match reqwest::Url::parse(&options.url) {
        Ok(url) if url.scheme() == "http" => url,
        _ => {
            let problem = format!(
                "{} is not the URL of a health path; write http://127.0.0.1:PORT/readyz",
                without_user(&options.url)
            );
            return fail(EXIT_USAGE, &[problem]);
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(EXIT_FAILED, &[format!("cannot start the async runtime: {error}")]),
    };
    match runtime.block_on(request(url)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => fail(EXIT_FAILED, &[problem]),
    }
}

async fn request(url: reqwest::Url) -> Result<(), String> {
    let client = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build();
    let client = client.map_err(|error| error.to_string())?;
    let shown = without_user(url.as_str());
    let response = client.get(url).send().await;
    // With its sources: the error itself has no cause.
    let mut response = response.map_err(|error| {
        format!("request to {shown} failed: {:#}", anyhow::Error::new(error.without_url()))
    })?;
    let status = response.status();
    if status == StatusCode::OK {
        return Ok(());
    }
    // One chunk has the reason, which is short.
    let reason = response.chunk().await.ok().flatten().unwrap_or_default();
    let reason = String::from_utf8_lossy(reason.get(..REASON_BYTES_MAX).unwrap_or(&reason)).into_owned();
    Err(format!("{shown} returned {status}: {}", reason.trim()))
}

/// Returns a URL without user name and password. The text need not be a valid URL.
fn without_user(url: &str) -> String {
    let Some((before, after)) = url.rsplit_once('@') else { return url.to_owned() };
    let scheme = before.split_once("://").map_or_else(String::new, |(scheme, _)| format!("{scheme}://"));
    scheme + after
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::routing::get;

    #[tokio::test]
    async fn only_200_is_healthy_and_a_failure_has_the_reason() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let router = Router::new()
            .route("/readyz", get(|| async { "ready" }))
            .route("/livez", get(|| async { (StatusCode::SERVICE_UNAVAILABLE, "a lock is stuck\n") }));
        let server = tokio::spawn(axum::serve(listener, router).into_future());
        let url = |path: &str| format!("http://{address}{path}").parse().expect("a URL");
        assert_eq!(request(url("/readyz")).await, Ok(()));
        let problem = request(url("/livez")).await.expect_err("it is not healthy");
        assert!(problem.ends_with("/livez returned 503 Service Unavailable: a lock is stuck"), "{problem}");
        server.abort();
        assert!(server.await.is_err());
        let problem = request(url("/readyz")).await.expect_err("nothing listens");
        assert!(problem.contains("failed") && problem.contains("refused"), "{problem}");
        let secret = format!("http://jane:secret@{address}/readyz").parse().expect("a URL");
        let problem = request(secret).await.expect_err("nothing listens");
        assert!(
            problem.contains(&format!("http://{address}/readyz")) && !problem.contains("secret"),
            "{problem}"
        );
    }

    #[test]
    fn a_url_is_printed_without_its_password() {
        assert_eq!(without_user("http://127.0.0.1:1/readyz"), "http://127.0.0.1:1/readyz");
        assert_eq!(without_user("https://jane:se@c/ret@hub:1/readyz"), "https://hub:1/readyz");
        assert_eq!(without_user("jane:secret@hub"), "hub");
    }
}
