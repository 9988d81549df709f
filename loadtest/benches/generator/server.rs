//! Minimal server: sends the same response to every request.
//!
//! One thread per connection, one read and one write per request; only `content-length` is parsed.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

/// Prints its URL and serves rows of `dimensions` numbers until killed.
pub(crate) fn serve(dimensions: usize) {
    let row: Vec<f32> = (0..dimensions).map(|index| ((index * 37 % 101) as f32 - 50.0) / 613.0).collect();
    let body = serde_json::json!({
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": row}],
        "model": "minilm",
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
    });
    let body = body.to_string();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-meridian-region: aws/eu-central-1\r\n";
    let response = format!("{head}content-length: {}\r\n\r\n{body}", body.len()).into_bytes();
    let response: &'static [u8] = response.leak();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    println!("http://{}/v1", listener.local_addr().expect("an address"));
    for connection in listener.incoming().flatten() {
        std::thread::spawn(move || serve_connection(connection, response));
    }
}

fn serve_connection(mut connection: TcpStream, response: &[u8]) {
    let mut buffer = vec![0; 64 << 10];
    let mut filled = 0;
    // The client may have disconnected.
    let _ignored = connection.set_nodelay(true);
    while let Ok(count) = connection.read(&mut buffer[filled..]) {
        filled += count;
        if count == 0 {
            return;
        }
        while let Some(length) = length(&buffer[..filled]) {
            buffer.copy_within(length..filled, 0);
            filled -= length;
            if connection.write_all(response).is_err() {
                return;
            }
        }
    }
}

/// Returns the length of the request at the front; `None` while it is incomplete.
fn length(bytes: &[u8]) -> Option<usize> {
    let head = bytes.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&bytes[..head]).ok()?;
    let length = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    Some(head + length.unwrap_or(0)).filter(|length| *length <= bytes.len())
}
