//! Frames of HTTP/2: sizes, streams, states (RFC 9113, 3 to 6).

use crate::case::{BODY, Case, Expected, Outcome, STREAM_ERROR, Step, post};
use crate::frames::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PADDED, PING, PREFACE, PRIORITY,
    PUSH_PROMISE, RST_STREAM, SETTINGS, WINDOW_UPDATE, WITH_PRIORITY, complete_request, frame, request,
    settings, window,
};

const CONNECTION: [Outcome; 1] = [Outcome::ConnectionError];
const SERVED: [Outcome; 1] = [Outcome::Status(&[200])];
/// The frame may be ignored and the following request served.
const EITHER: [Outcome; 3] = [Outcome::Status(&[200, 400]), Outcome::Reset, Outcome::ConnectionError];

pub(super) fn cases() -> Vec<Case> {
    sizes().into_iter().chain(streams()).chain(states()).chain(parameters()).chain(prefaces()).collect()
}

fn open_stream(stream: u32) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, request(&[]))
}

fn case(name: &str, frames: Vec<Vec<u8>>, outcomes: &[Outcome]) -> Case {
    Case::h2(format!("h2 {name}"), frames, outcomes)
}

fn sizes() -> Vec<Case> {
    let large = vec![0; (16 << 10) + 1];
    let mut cases = Vec::new();
    for length in [1, 5, 7] {
        cases.push(case(
            &format!("SETTINGS of {length} bytes"),
            vec![frame(SETTINGS, 0, 0, vec![0; length])],
            &CONNECTION,
        ));
    }
    for length in [0, 7, 9] {
        cases.push(case(
            &format!("PING of {length} bytes"),
            vec![frame(PING, 0, 0, vec![0; length])],
            &CONNECTION,
        ));
    }
    for length in [0, 3, 5] {
        let frames = |kind, stream| vec![open_stream(1), frame(kind, 0, stream, vec![1; length])];
        cases.push(case(&format!("RST_STREAM of {length} bytes"), frames(RST_STREAM, 1), &CONNECTION));
        cases.push(case(&format!("WINDOW_UPDATE of {length} bytes"), frames(WINDOW_UPDATE, 1), &CONNECTION));
        cases.push(case(
            &format!("WINDOW_UPDATE of {length} bytes for all"),
            frames(WINDOW_UPDATE, 0),
            &CONNECTION,
        ));
        cases.push(case(&format!("PRIORITY of {length} bytes"), frames(PRIORITY, 1), &STREAM_ERROR));
        cases.push(case(&format!("GOAWAY of {length} bytes"), frames(GOAWAY, 0), &CONNECTION));
    }
    cases.extend([
        case("SETTINGS ACK with a payload", vec![frame(SETTINGS, ACK, 0, [0; 6])], &CONNECTION),
        case("HEADERS of 16,385 bytes", vec![frame(HEADERS, END_HEADERS, 1, &large)], &CONNECTION),
        case("DATA of 16,385 bytes", vec![open_stream(1), frame(DATA, 0, 1, &large)], &STREAM_ERROR),
        case(
            "CONTINUATION of 16,385 bytes",
            vec![frame(HEADERS, 0, 1, request(&[])), frame(CONTINUATION, 4, 1, &large)],
            &CONNECTION,
        ),
        case("an unknown frame of 16,385 bytes", vec![frame(99, 0, 0, &large)], &CONNECTION),
        case("an unknown frame", vec![frame(99, 0xff, 77, b"x"), complete_request(1)], &SERVED),
        case("a frame that declares 16 MB", vec![vec![0xff, 0xff, 0xff, DATA, 0, 0, 0, 0, 1]], &CONNECTION),
        case("HEADERS without a byte", vec![frame(HEADERS, END_HEADERS | END_STREAM, 1, [])], &STREAM_ERROR),
        case(
            "HEADERS too short for their priority",
            vec![frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, [0; 4])],
            &CONNECTION,
        ),
        case(
            "HEADERS too short for their padding",
            vec![frame(HEADERS, END_HEADERS | PADDED, 1, [])],
            &CONNECTION,
        ),
        case("DATA too short for its padding", vec![open_stream(1), frame(DATA, PADDED, 1, [])], &CONNECTION),
        case(
            "DATA of padding and more",
            vec![open_stream(1), frame(DATA, PADDED, 1, [5, 0, 0])],
            &CONNECTION,
        ),
        case(
            "DATA of padding as long as itself",
            vec![open_stream(1), frame(DATA, PADDED, 1, [3, 0, 0])],
            &CONNECTION,
        ),
        case(
            "HEADERS of padding and more",
            vec![frame(HEADERS, END_HEADERS | PADDED, 1, [200, 0x82])],
            &CONNECTION,
        ),
        case(
            "DATA with valid padding",
            vec![
                open_stream(1),
                frame(DATA, PADDED | END_STREAM, 1, [&[3], BODY.as_bytes(), &[0; 3]].concat()),
            ],
            &SERVED,
        ),
        case(
            "reserved bits",
            vec![
                frame(HEADERS, END_HEADERS, 1 | 1 << 31, request(&[])),
                frame(DATA, END_STREAM, 1 | 1 << 31, BODY),
            ],
            &EITHER,
        ),
    ]);
    cases
}

fn streams() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, name) in [
        (DATA, "DATA"),
        (HEADERS, "HEADERS"),
        (PRIORITY, "PRIORITY"),
        (RST_STREAM, "RST_STREAM"),
        (CONTINUATION, "CONTINUATION"),
        (PUSH_PROMISE, "PUSH_PROMISE"),
    ] {
        cases.push(case(
            &format!("{name} on stream 0"),
            vec![frame(kind, END_HEADERS, 0, [0; 5]), frame(PING, 0, 0, [0; 7])],
            &CONNECTION,
        ));
    }
    for (kind, name, length) in [(SETTINGS, "SETTINGS", 6), (PING, "PING", 8), (GOAWAY, "GOAWAY", 8)] {
        cases.push(case(
            &format!("{name} on stream 1"),
            vec![open_stream(1), frame(kind, 0, 1, vec![0; length])],
            &CONNECTION,
        ));
    }
    cases.extend([
        case("HEADERS on stream 2", vec![complete_request(2)], &CONNECTION),
        case(
            "PUSH_PROMISE from a client",
            vec![open_stream(1), frame(PUSH_PROMISE, END_HEADERS, 1, [0, 0, 0, 2])],
            &CONNECTION,
        ),
        case("DATA on an idle stream", vec![frame(DATA, END_STREAM, 1, "x")], &CONNECTION),
        case(
            "DATA on an idle stream behind others",
            vec![open_stream(1), frame(DATA, END_STREAM, 9, "x")],
            &CONNECTION,
        ),
        case("RST_STREAM on an idle stream", vec![frame(RST_STREAM, 0, 1, [0, 0, 0, 8])], &CONNECTION),
        case("WINDOW_UPDATE on an idle stream", vec![window(1, 1)], &CONNECTION),
        case(
            "CONTINUATION on an idle stream",
            vec![frame(CONTINUATION, END_HEADERS, 1, request(&[]))],
            &CONNECTION,
        ),
        case(
            "CONTINUATION behind a whole head",
            vec![open_stream(1), frame(CONTINUATION, END_HEADERS, 1, request(&[]))],
            &CONNECTION,
        ),
        case(
            "a stream below the last",
            vec![open_stream(5), open_stream(3), frame(DATA, END_STREAM, 3, BODY)],
            &CONNECTION,
        ),
        case("the last of all streams", vec![open_stream((1 << 31) - 1), open_stream(1)], &CONNECTION),
        case(
            "PRIORITY on a stream of its own",
            vec![frame(PRIORITY, 0, 1, [0, 0, 0, 1, 0]), complete_request(1)],
            &EITHER,
        ),
        case(
            "PRIORITY in a circle",
            vec![
                frame(PRIORITY, 0, 3, [0, 0, 0, 5, 0]),
                frame(PRIORITY, 0, 5, [0, 0, 0, 3, 0]),
                complete_request(1),
            ],
            &EITHER,
        ),
        case(
            "HEADERS that depend on themselves",
            vec![
                frame(
                    HEADERS,
                    END_HEADERS | WITH_PRIORITY,
                    1,
                    [&[0, 0, 0, 1, 0][..], &request(&[])].concat(),
                ),
                frame(DATA, END_STREAM, 1, BODY),
            ],
            &EITHER,
        ),
    ]);
    cases
}

fn states() -> Vec<Case> {
    let split = request(&[]);
    let (first, second) = split.split_at(20);
    let open = || frame(HEADERS, 0, 1, first);
    let mut cases: Vec<Case> = [
        ("PING", frame(PING, 0, 0, [0; 8])),
        ("DATA", frame(DATA, 0, 1, "x")),
        ("SETTINGS", settings(&[])),
        ("WINDOW_UPDATE", window(0, 1)),
        ("RST_STREAM", frame(RST_STREAM, 0, 1, [0, 0, 0, 8])),
        ("PRIORITY", frame(PRIORITY, 0, 1, [0, 0, 0, 3, 0])),
        ("GOAWAY", frame(GOAWAY, 0, 0, [0; 8])),
        ("HEADERS of another stream", open_stream(3)),
        ("CONTINUATION of another stream", frame(CONTINUATION, END_HEADERS, 3, second)),
        ("an unknown frame", frame(99, 0, 0, "x")),
    ]
    .into_iter()
    .map(|(name, between)| {
        case(
            &format!("{name} inside of a head"),
            vec![open(), between, frame(CONTINUATION, END_HEADERS, 1, second)],
            &CONNECTION,
        )
    })
    .collect();
    let bytes: Vec<Vec<u8>> = split.iter().map(|byte| frame(CONTINUATION, 0, 1, [*byte])).collect();
    cases.extend([
        case(
            "a head in two frames",
            vec![open(), frame(CONTINUATION, END_HEADERS, 1, second), frame(DATA, END_STREAM, 1, BODY)],
            &SERVED,
        ),
        case(
            "a head in frames of a byte",
            [
                vec![frame(HEADERS, 0, 1, [])],
                bytes,
                vec![frame(CONTINUATION, END_HEADERS, 1, []), frame(DATA, END_STREAM, 1, BODY)],
            ]
            .concat(),
            &EITHER,
        ),
        case("DATA behind the end", vec![complete_request(1), frame(DATA, END_STREAM, 1, "x")], &EITHER),
        case("HEADERS behind the end", vec![complete_request(1), open_stream(1)], &EITHER),
        case(
            "a head twice",
            vec![open_stream(1), open_stream(1), frame(DATA, END_STREAM, 1, BODY)],
            &STREAM_ERROR,
        ),
        case(
            "DATA behind a reset",
            vec![
                open_stream(1),
                frame(RST_STREAM, 0, 1, [0, 0, 0, 8]),
                frame(DATA, END_STREAM, 1, BODY),
                complete_request(3),
            ],
            &[Outcome::Reset, Outcome::ConnectionError, Outcome::Served(3)],
        ),
        case(
            "a reset behind the end",
            vec![complete_request(1), frame(RST_STREAM, 0, 1, [0, 0, 0, 8]), complete_request(3)],
            &[Outcome::Served(3), Outcome::ConnectionError],
        ),
        case("a request behind GOAWAY", vec![frame(GOAWAY, 0, 0, [0; 8]), complete_request(1)], &EITHER),
        case("three requests", vec![complete_request(1), complete_request(3), complete_request(5)], &SERVED),
    ]);
    cases
}

fn parameters() -> Vec<Case> {
    let mut cases = Vec::new();
    for (id, value, outcomes) in [
        (1, 0, &SERVED[..]),
        (1, u32::MAX, &SERVED),
        (2, 0, &SERVED),
        (2, 1, &SERVED),
        (2, 2, &CONNECTION),
        (3, 0, &SERVED),
        (4, (1 << 31) - 1, &SERVED),
        (4, 1 << 31, &CONNECTION),
        (4, u32::MAX, &CONNECTION),
        (5, 16_383, &CONNECTION),
        (5, 0, &CONNECTION),
        (5, 16_777_215, &SERVED),
        (5, 16_777_216, &CONNECTION),
        (6, 0, &EITHER),
        (8, 1, &SERVED),
        (8, 2, &EITHER),
        (0, 1, &SERVED),
        (0xffff, u32::MAX, &SERVED),
    ] {
        cases.push(case(
            &format!("setting {id} = {value}"),
            vec![settings(&[(id, value)]), complete_request(1)],
            outcomes,
        ));
    }
    let overflow = (1 << 31) - 1;
    cases.extend([
        case(
            "settings that contradict each other",
            vec![settings(&[(4, 0), (4, 65_535), (4, 1)]), settings(&[(4, 65_535)]), complete_request(1)],
            &SERVED,
        ),
        case("a window update of zero", vec![open_stream(1), window(1, 0)], &STREAM_ERROR),
        case("a connection window update of zero", vec![window(0, 0)], &CONNECTION),
        case("a window that overflows", vec![open_stream(1), window(1, overflow)], &STREAM_ERROR),
        case("a window for all that overflows", vec![window(0, overflow)], &CONNECTION),
        case(
            "a window that overflows by a setting",
            vec![open_stream(1), window(1, overflow - 65_535), settings(&[(4, 65_536)])],
            &CONNECTION,
        ),
        case("an unexpected SETTINGS ACK", vec![frame(SETTINGS, ACK, 0, []), complete_request(1)], &EITHER),
        case("an unexpected PING ACK", vec![frame(PING, ACK, 0, [7; 8]), complete_request(1)], &SERVED),
        case(
            "more than the window",
            std::iter::once(open_stream(1))
                .chain((0..300).map(|_| frame(DATA, 0, 1, vec![b' '; 16_000])))
                .collect(),
            // 4.8 MB against a window of 1 MiB, unless the gateway reads as fast.
            &[Outcome::Reset, Outcome::ConnectionError, Outcome::Status(&[400, 408, 413])],
        ),
    ]);
    cases
}

/// Connection prefaces (RFC 9113, 3.4).
fn prefaces() -> Vec<Case> {
    let raw = |name: &str, bytes: Vec<u8>, expected| {
        Case::new(format!("h2 {name}"), vec![Step::Send(bytes), Step::HalfClose], expected)
    };
    let case = |bytes: &[u8]| [PREFACE, bytes].concat();
    let any = || Expected::AnyOf(CONNECTION.to_vec());
    let mut cases = vec![
        raw("preface of another version", b"PRI * HTTP/2.1\r\n\r\nSM\r\n\r\n".to_vec(), Expected::Closed),
        raw("preface with another end", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n".to_vec(), Expected::Closed),
        raw("preface with fields", b"PRI * HTTP/2.0\r\nhost: x\r\n\r\nSM\r\n\r\n".to_vec(), Expected::Closed),
        raw("preface in small letters", b"pri * http/2.0\r\n\r\nsm\r\n\r\n".to_vec(), Expected::Closed),
        raw("preface twice", [PREFACE, PREFACE].concat(), any()),
        raw("preface alone", PREFACE.to_vec(), any()),
        raw("preface and a PING", case(&frame(PING, 0, 0, [0; 8])), any()),
        raw("preface and a request", case(&complete_request(1)), any()),
        raw("preface and an ACK", case(&frame(SETTINGS, ACK, 0, [])), any()),
        raw("preface and HTTP/1", case(&post("", BODY)), any()),
        raw("preface and noise", case(&[0xa5; 300]), any()),
        raw("SETTINGS without a preface", settings(&[]), Expected::Closed),
        raw("SETTINGS on another stream", case(&frame(SETTINGS, 0, 1, [])), any()),
        raw(
            "SETTINGS without an ACK, and a request",
            case(&[settings(&[]), complete_request(1)].concat()),
            Expected::AnyOf(EITHER.to_vec()),
        ),
    ];
    for part in [1, 5, 16, 20, 23] {
        cases.push(Case::new(
            format!("h2 {part} bytes of a preface"),
            vec![Step::Send(PREFACE[..part].to_vec())],
            Expected::Closed,
        ));
    }
    cases
}
