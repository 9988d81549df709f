//! HTTP/2 clients that only keep us busy are told to calm down, and nobody else notices.

use crate::scene::{Edge, PATIENCE, Scene, ask};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const ENHANCE_YOUR_CALM: u32 = 11;

/// HPACK: GET, http, /, and the authority "x" (RFC 7541, A and 6.2.2).
const HEAD: [u8; 6] = [0x82, 0x86, 0x84, 0x41, 0x01, b'x'];

/// What a flooder sends as his n-th.
type Frames = fn(u32) -> Vec<u8>;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Sends frames until the other side closes; the reason of its GOAWAY.
async fn flood(edge: &Edge, frames: Frames) -> Option<u32> {
    let stream = edge.connect().await;
    let (mut read, mut write) = stream.into_split();
    let mut reading = tokio::spawn(async move {
        let mut all = Vec::new();
        read.read_to_end(&mut all).await.ok();
        all
    });
    write.write_all(&[PREFACE, &frame(4, 0, 0, &[])].concat()).await.unwrap();
    let sending = async {
        for round in 0_u32.. {
            let batch: Vec<u8> = (0..100).flat_map(|number| frames(round * 100 + number)).collect();
            if round > 1000 || write.write_all(&batch).await.is_err() {
                return;
            }
        }
    };
    let ended = async {
        tokio::select! {
            all = &mut reading => all.unwrap(),
            () = sending => reading.await.unwrap(),
        }
    };
    let all = tokio::time::timeout(PATIENCE, ended).await.expect("the connection ends");
    // Frame by frame to the last GOAWAY.
    let (mut rest, mut reason) = (&all[..], None);
    while let [high, mid, low, kind, _, _, _, _, _, payload @ ..] = rest {
        let length = u32::from_be_bytes([0, *high, *mid, *low]) as usize;
        let Some(payload) = payload.get(..length) else { break };
        if *kind == 7 {
            reason = Some(u32::from_be_bytes(payload[4..8].try_into().unwrap()));
        }
        rest = &rest[9 + length..];
    }
    reason
}

#[tokio::test]
async fn frames_that_bring_nothing_are_taken_up_to_a_limit() {
    let scene = Scene::new().await;
    let edge = scene.edge("").await;
    let mut bystander = edge.connect().await;
    let cases: [(&str, Frames); 4] = [
        ("PING", |_| frame(6, 0, 0, &[0; 8])),
        ("SETTINGS", |_| frame(4, 0, 0, &[])),
        ("PRIORITY", |_| frame(2, 0, 1, &[0, 0, 0, 0, 1])),
        ("rapid reset", |number| {
            let stream = 2 * number + 1;
            [frame(1, 5, stream, &HEAD), frame(3, 0, stream, &[0, 0, 0, 8])].concat()
        }),
    ];
    for (name, frames) in cases {
        let reason = flood(&edge, frames).await;
        // A reset overtakes what was written before it, when the flooder had not read it yet.
        assert!(reason.is_none_or(|reason| reason == ENHANCE_YOUR_CALM), "{name}: {reason:?}");
        let asked = tokio::time::timeout(Duration::from_secs(2), ask(&mut bystander)).await;
        assert_eq!(asked.expect("others are served").status, 200, "after {name}");
    }
    assert_eq!(scene.region.requests(), 4, "those of the bystander");
}
