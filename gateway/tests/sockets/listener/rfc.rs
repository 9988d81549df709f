//! Malformed and ambiguous requests by RFC 9110 and 9112.

use super::fixture::{BODY, ClientResponse, Fixture, post, read_response, read_until_closed, send_and_read};
use tokio::io::AsyncWriteExt;

#[tokio::test]
async fn a_malformed_request_is_rejected_and_its_connection_closed_and_others_continue() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let mut bystander = edge.connect().await;
    let mut served = 0;
    let mut check = async |request: String, status: u16, code: &str| {
        let ClientResponse { status: got, head, body } = edge.send_bytes(request.as_bytes()).await;
        let shown: String = request.chars().take(120).collect();
        assert_eq!(got, status, "{shown:?}: {head} {body}");
        assert!(head.contains(&format!("x-meridian-error: {code}")), "{shown:?}: {head}");
        assert!(head.contains("connection: close"), "{shown:?}: {head}");
        assert_eq!(send_and_read(&mut bystander).await.status, 200, "another connection, after {shown:?}");
        served += 1;
        assert_eq!(fixture.region.requests(), served, "no region receives {shown:?}");
    };
    let head = |fields: &str| {
        format!("POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n{fields}\r\n")
    };
    let malformed = "malformed_request";
    // Two lengths of one body (RFC 9112, 6.1 and 6.3): request smuggling.
    check(
        head("content-length: 35\r\ntransfer-encoding: chunked\r\n") + "0\r\n\r\nGET /admin HTTP/1.1\r\n",
        400,
        malformed,
    )
    .await;
    check(head("transfer-encoding: chunked\r\ncontent-length: 4\r\n") + "23\r\n", 400, malformed).await;
    check(head("content-length: 35\r\ncontent-length: 0\r\n") + BODY, 400, malformed).await;
    check(head("content-length: 35\r\ncontent-length: 35\r\n") + BODY, 400, malformed).await;
    check(head("content-length: 35, 35\r\n") + BODY, 400, malformed).await;
    check(head("content-length: -1\r\n"), 400, malformed).await;
    check(head("content-length: +35\r\n") + BODY, 400, malformed).await;
    check(head("content-length: 99999999999999999999\r\n"), 400, malformed).await;
    let coding = "unknown_transfer_coding";
    check(head("transfer-encoding: gzip\r\n"), 501, coding).await;
    check(head("transfer-encoding: chunked, identity\r\n"), 501, coding).await;
    check(head("transfer-encoding: \x0bchunked\r\n"), 400, malformed).await;
    check(head("transfer-encoding : chunked\r\n"), 400, malformed).await;
    check("POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n".into(), 400, malformed).await;
    // Host (3.2).
    check(head("host: y\r\n"), 400, malformed).await;
    check("GET /v1/models HTTP/1.1\r\n\r\n".into(), 400, malformed).await;
    check("GET http:///v1/models HTTP/1.1\r\nhost: x\r\n\r\n".into(), 400, malformed).await;
    check("GET http://u@y/v1/models HTTP/1.1\r\nhost: y\r\n\r\n".into(), 400, malformed).await;
    // Line ends (2.2, 5.2).
    check(head("x-a: b\rc\r\n"), 400, malformed).await;
    check(head("x-a: b\nx-c: d\r\n"), 400, malformed).await;
    check("GET /v1/models HTTP/1.1\nhost: x\n\n".into(), 400, malformed).await;
    check(head("x-a: b\r\n c\r\n"), 400, malformed).await;
    check(head("x-a\r\n"), 400, malformed).await;
    check(head("x-a: \0\r\n"), 400, malformed).await;
    check(head("x(a): b\r\n"), 400, malformed).await;
    // Request lines (3).
    for line in ["GET", "GET /", "GET / HTTP/1.1 x", "GET  / HTTP/1.1", "G\0T / HTTP/1.1", "GET / HTTP/9.9"] {
        check(format!("{line}\r\nhost: x\r\n\r\n"), 400, malformed).await;
    }
    check("GET /\u{e9} HTTP/1.1\r\nhost: x\r\n\r\n".into(), 400, malformed).await;
    check("\u{16}\u{3}\u{1}".into(), 400, malformed).await;
    check("this is not HTTP\r\n\r\n".into(), 400, malformed).await;
    // Chunks (7.1).
    for chunks in [
        "x\r\n",
        "-5\r\nabcde\r\n0\r\n\r\n",
        "fffffffffffffffff\r\n",
        "5\r\nabcdefgh\r\n0\r\n\r\n",
        "0x5\r\nabcde\r\n0\r\n\r\n",
        // Line ends, which smuggling exploits in chunks too.
        "5\nabcde\r\n0\r\n\r\n",
        "5\rabcde\r\n0\r\n\r\n",
        "5\r\nabcde\n0\r\n\r\n",
        "5\r\nabcde0\r\n\r\n",
        // A lone LF in an extension is a line end for some parsers.
        "5;x\nabcde\r\n0\r\n\r\n",
        "5;x=\"a\nb\"\r\nabcde\r\n0\r\n\r\n",
        "5;x\0\r\nabcde\r\n0\r\n\r\n",
        "5\r\nabcde\r\n0;x\n\r\n\r\n",
        // Trailers that would be another head.
        "0\r\ncontent-length: 5\r\n\r\n",
        "0\r\nAuthorization: Bearer k\r\n\r\n",
        "0\r\nx: y\nz: y\r\n\r\n",
        "0\r\n x: y\r\n\r\n",
        " 5\r\nabcde\r\n0\r\n\r\n",
    ] {
        check(head("transfer-encoding: chunked\r\n") + chunks, 400, malformed).await;
    }
    let endless = format!("5;{}\r\nabcde\r\n0\r\n\r\n", "x".repeat(100_000));
    check(head("transfer-encoding: chunked\r\n") + &endless, 400, malformed).await;
    let trailers = format!("0\r\nx-a: {}\r\n\r\n", "x".repeat(100_000));
    check(head("transfer-encoding: chunked\r\n") + &trailers, 400, malformed).await;
    // Sizes.
    let large = "head_too_large";
    check(head(&format!("x-a: {}\r\n", "x".repeat(64 << 10))), 431, large).await;
    check(head(&"x-a: b\r\n".repeat(100)), 431, large).await;
    check(format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "x".repeat(8 << 10)), 431, large).await;
    check("x".repeat(1 << 20), 431, large).await;
}

#[tokio::test]
async fn valid_variants_are_accepted() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let mut stream = edge.connect().await;
    let mut check = async |request: &str, status: u16, word: &str| {
        stream.write_all(request.as_bytes()).await.unwrap();
        let response = read_response(&mut stream).await;
        assert_eq!(response.status, status, "{request:?}: {response:?}");
        assert!(response.body.contains(word), "{request:?}: {response:?}");
        assert_eq!(response.header("connection"), "keep-alive", "{request:?}");
    };
    let models = |line: &str| format!("{line}\r\nhost: x\r\nauthorization: Bearer k\r\n\r\n");
    check(&models("GET /v1/models HTTP/1.1"), 200, "anywhere").await;
    check(&models("\r\nGET /v1/models HTTP/1.1"), 200, "anywhere").await;
    // An absolute URI, whose host takes precedence (3.2.2).
    check(&models("GET http://x/v1/models HTTP/1.1"), 200, "anywhere").await;
    check(&models("GET http://y:1/v1/models?a=b HTTP/1.1"), 200, "anywhere").await;
    check(&models("GET HTTPS://[::1]/v1/models HTTP/1.1"), 200, "anywhere").await;
    check(&models("GET http://x HTTP/1.1"), 404, "path does not exist").await;
    check(&post("", BODY).replace("POST /", "POST http://y/"), 200, "\"bytes\":35").await;
    check(&models("GET /v1/models?a=b HTTP/1.1"), 200, "anywhere").await;
    check(&models("OPTIONS * HTTP/1.1"), 404, "path does not exist").await;
    check(&models("DELETE /v1/models HTTP/1.1"), 405, "GET").await;
    check(&post("", BODY), 200, "\"bytes\":35").await;
    check(&post("X-Odd~`!:\t \"v\u{e9}\" \r\nexpect: something\r\n", BODY), 200, "\"bytes\":35").await;
    let chunked = |chunks: &str| {
        format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ntransfer-encoding: Chunked\r\n\r\n{chunks}"
        )
    };
    let (start, end) = BODY.split_at(5);
    let pieces = format!("5;a=b\r\n{start}\r\n1E \r\n{end}\r\n000\r\nx-trailer: y\r\n\r\n");
    check(&chunked(&pieces), 200, "\"bytes\":35").await;
}

#[tokio::test]
async fn a_head_response_has_the_length_of_the_omitted_body() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let send_and_read = async |method: &str| {
        let fields = "host: x\r\nauthorization: Bearer k\r\nconnection: close";
        edge.send_bytes(format!("{method} /v1/models HTTP/1.1\r\n{fields}\r\n\r\n").as_bytes()).await
    };
    let (get, head) = (send_and_read("GET").await, send_and_read("HEAD").await);
    assert_eq!((head.status, head.body.as_str()), (200, ""), "{head:?}");
    assert_eq!(head.header("content-length"), get.body.len().to_string());
}

#[tokio::test]
async fn pipelined_requests_are_served_in_order() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let mut stream = edge.connect().await;
    let longer = |more: usize| BODY.replace("\"x\"", &format!("\"{}\"", "x".repeat(1 + more)));
    let together: String = (0..10).map(|more| post("", &longer(more))).collect();
    // Cut in the middle of a head, and of a body.
    for piece in together.as_bytes().chunks(97) {
        stream.write_all(piece).await.unwrap();
    }
    for more in 0..10 {
        assert_eq!(read_response(&mut stream).await.json()["bytes"], 35 + more);
    }
}

#[tokio::test]
async fn an_http_1_0_connection_closes_unless_keep_alive_is_requested() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let request =
        |fields: &str| format!("GET /v1/models HTTP/1.0\r\nauthorization: Bearer k\r\n{fields}\r\n");
    let response = edge.send_bytes(request("").as_bytes()).await;
    assert_eq!((response.status, response.header("connection")), (200, "close"), "{response:?}");
    let mut stream = edge.connect().await;
    for _ in 0..2 {
        stream.write_all(request("connection: keep-alive\r\n").as_bytes()).await.unwrap();
        let response = read_response(&mut stream).await;
        assert_eq!((response.status, response.header("connection")), (200, "keep-alive"), "{response:?}");
    }
}

#[tokio::test]
async fn expect_100_continue_gets_continue_or_the_final_response_at_once() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let mut stream = edge.connect().await;
    let request = post("expect: 100-continue\r\n", BODY);
    let (head, body) = request.split_at(request.len() - BODY.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(read_response(&mut stream).await.status, 100);
    stream.write_all(body.as_bytes()).await.unwrap();
    assert_eq!(read_response(&mut stream).await.status, 200);

    // A rejection needs no body; whether the client still sends it is unknown, so the connection is closed.
    let mut stream = edge.connect().await;
    let request = request.replace("Bearer k", "Bearer wrong");
    stream.write_all(&request.as_bytes()[..request.len() - BODY.len()]).await.unwrap();
    let response = read_response(&mut stream).await;
    assert_eq!((response.status, response.header("connection")), (401, "close"), "{response:?}");
    stream.shutdown().await.unwrap();
    assert_eq!(read_until_closed(&mut stream).await.status, 0, "nothing more");
}
