//! A request without tokens that takes longer than its tenant counts as active affects no other request.

use super::fixture::{AMERICA, EUROPE, Fixture, JAPAN};
use super::region::Script::Takes;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[tokio::test]
async fn a_slow_request_without_tokens_affects_no_other_request() {
    // Longer than the second after which an idle tenant is forgotten, and five report periods.
    let slow = Takes(Duration::from_millis(1_800));
    let fixture = Fixture::with([(AMERICA, slow), (EUROPE, slow), (JAPAN, slow)]).await;
    for method in ["GET", "HEAD"] {
        let mut stream = TcpStream::connect(fixture.address).await.unwrap();
        let head = format!(
            "{method} /deployments/anywhere/info HTTP/1.1\r\nhost: a\r\nauthorization: Bearer k\r\n\
             x-meridian-timeout-ms: 2500\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut response = Vec::new();
        stream.read_to_end(&mut response).await.unwrap();
        assert!(response.starts_with(b"HTTP/1.1 "), "{method}: {}", String::from_utf8_lossy(&response));
        // And one whose client disconnects while it is in flight.
        let mut leaves = TcpStream::connect(fixture.address).await.unwrap();
        leaves.write_all(head.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        drop(leaves);

        for path in ["/livez", "/readyz"] {
            let probed = fixture.client.get(format!("{}{path}", fixture.operations)).send().await.unwrap();
            assert_eq!(probed.status(), 200, "{path} after {method}: {}", probed.text().await.unwrap());
        }
        let served = fixture.send("anywhere", &[]).await.unwrap();
        assert_eq!(served.status(), 200, "after {method}");
    }
    let metrics = fixture.client.get(format!("{}/metrics", fixture.operations)).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    assert!(metrics.contains("meridian_gateway_panics_total{scope=\"request\"} 0\n"), "{metrics}");
    assert!(metrics.contains("meridian_gateway_panics_total{scope=\"lock\"} 0\n"), "{metrics}");
}
