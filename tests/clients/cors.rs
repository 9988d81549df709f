//! CORS headers for scripts of web pages, with and without `[cors]` in the gateway's configuration.

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use replica_api::api::RESPONSE_HEADERS;
use reqwest::{Method, StatusCode};

use crate::local_fleet::meridian;

const PAGE: &str = "https://app.example.com";

/// Gateway without a hub: it has no deployment, and responds only to requests that need none.
struct Gateway {
    process: Child,
    url: String,
    client: reqwest::Client,
    _folder: tempfile::TempDir,
}

impl Gateway {
    async fn start(cors: &str) -> Gateway {
        let folder = tempfile::tempdir().unwrap();
        let port = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (listen, operations) = (port(), port());
        let tenants = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/tenants.toml");
        let text = format!(
            "listen = \"{listen}\"\noperations = \"{operations}\"\nregion = \"aws/us-east-1\"\nhub = \"http://127.0.0.1:9\"\n\
             tenants = \"{}\"\nsnapshot = \"routes\"\n{cors}",
            tenants.display()
        );
        let file = folder.path().join("gateway.toml");
        std::fs::write(&file, text).unwrap();
        let process = meridian()
            .args(["gateway", "--config"])
            .arg(&file)
            .env("MERIDIAN_KEY", "local")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let gateway = Gateway {
            process,
            url: format!("http://{listen}"),
            client: reqwest::Client::new(),
            _folder: folder,
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while gateway.client.get(format!("{}/openapi.json", gateway.url)).send().await.is_err() {
            assert!(Instant::now() < deadline, "the gateway does not start");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        gateway
    }

    async fn send(&self, method: Method, path: &str, headers: &[(&str, &str)]) -> reqwest::Response {
        let mut request = self.client.request(method, format!("{}{path}", self.url));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn header<'a>(response: &'a reqwest::Response, name: &str) -> &'a str {
    response.headers().get(name).map(|value| value.to_str().unwrap()).unwrap_or_default()
}

#[tokio::test]
async fn a_page_may_read_responses_only_where_the_configuration_names_its_origin() {
    let request_method = "access-control-request-method";
    let allows = "access-control-allow-origin";
    let gateway = Gateway::start(&format!("[cors]\norigins = [\"{PAGE}\"]\nmax_age_s = 60\n")).await;
    let expected = ("access-control-request-headers", "authorization,x-stainless-os");
    let preflight = gateway
        .send(Method::OPTIONS, "/v1/embeddings", &[("origin", PAGE), (request_method, "POST"), expected])
        .await;
    assert_eq!(preflight.status(), StatusCode::NO_CONTENT);
    for (name, value) in [
        (allows, PAGE),
        ("access-control-allow-methods", "POST"),
        ("access-control-allow-headers", "authorization,x-stainless-os"),
        ("access-control-max-age", "60"),
        ("vary", "origin"),
    ] {
        assert_eq!(header(&preflight, name), value, "{name}");
    }
    // Errors have the headers, too, so that a page can read the reason.
    let refused = gateway.send(Method::GET, "/v1/models", &[("origin", PAGE)]).await;
    assert_eq!((refused.status(), header(&refused, allows)), (StatusCode::UNAUTHORIZED, PAGE));
    let exposed: Vec<&str> = header(&refused, "access-control-expose-headers").split(", ").collect();
    for (name, _) in RESPONSE_HEADERS {
        assert!(exposed.contains(name), "{name} is not exposed to pages");
    }
    let document = gateway.send(Method::GET, "/openapi.json", &[("origin", PAGE)]).await;
    assert_eq!((document.status(), header(&document, allows)), (StatusCode::OK, PAGE));
    let other = [("origin", "https://app.example.com.evil"), (request_method, "POST")];
    let other_origin = gateway.send(Method::OPTIONS, "/v1/embeddings", &other).await;
    assert_eq!(other_origin.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!((header(&other_origin, allows), header(&other_origin, "vary")), ("", "origin"));
    drop(gateway);

    let gateway = Gateway::start("").await;
    let preflight =
        gateway.send(Method::OPTIONS, "/v1/embeddings", &[("origin", PAGE), (request_method, "POST")]).await;
    assert_eq!((preflight.status(), header(&preflight, allows)), (StatusCode::METHOD_NOT_ALLOWED, ""));
}
