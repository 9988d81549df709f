//! HTTP/2 floods: many frames without effect, and flow-control windows that stay closed.

use std::time::Duration;

use crate::case::{Case, Expected, Outcome, Step};
use crate::frames::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PING, PRIORITY, RST_STREAM, SETTINGS,
    complete_request, fields, frame, request, settings, window,
};

pub(super) fn cases() -> Vec<Case> {
    flood_cases().into_iter().chain(resets()).chain(windows()).collect()
}

fn flooded(name: &str, before: Vec<u8>, again: Vec<u8>, times: usize) -> Case {
    let steps = vec![Step::Handshake(Vec::new()), Step::Send(before), Step::Repeat(again, times)];
    Case::new(format!("flood {name}"), steps, Expected::AnyOf(vec![Outcome::ConnectionError]))
}

fn flood_cases() -> Vec<Case> {
    let open_stream = || frame(HEADERS, END_HEADERS, 1, request(&[]));
    let open = || frame(HEADERS, 0, 1, request(&[]));
    vec![
        flooded("of PING", Vec::new(), frame(PING, 0, 0, [0; 8]), 20_000),
        flooded("of PING ACK", Vec::new(), frame(PING, ACK, 0, [0; 8]), 20_000),
        flooded("of SETTINGS", Vec::new(), settings(&[(4, 65_535)]), 20_000),
        flooded("of empty SETTINGS", Vec::new(), settings(&[]), 20_000),
        flooded("of SETTINGS ACK", Vec::new(), frame(SETTINGS, ACK, 0, []), 20_000),
        flooded("of PRIORITY", Vec::new(), frame(PRIORITY, 0, 1, [0, 0, 0, 3, 0]), 20_000),
        flooded("of frames of an unknown type", Vec::new(), frame(99, 0, 0, "x"), 20_000),
        flooded("of empty DATA", open_stream(), frame(DATA, 0, 1, []), 20_000),
        flooded(
            "of DATA that is all padding",
            open_stream(),
            frame(DATA, 8, 1, [&[255][..], &[0; 255]].concat()),
            20_000,
        ),
        flooded("of empty CONTINUATION", open(), frame(CONTINUATION, 0, 1, []), 20_000),
        flooded("of CONTINUATION", open(), frame(CONTINUATION, 0, 1, fields(&[("x-a", "b")])), 20_000),
        flooded(
            "of long CONTINUATION",
            open(),
            frame(CONTINUATION, 0, 1, fields(&[("x-a", &"b".repeat(16_000))])),
            2_000,
        ),
        flooded("of RST_STREAM on one stream", open_stream(), frame(RST_STREAM, 0, 1, [0, 0, 0, 8]), 20_000),
    ]
}

/// Streams that are opened and reset.
fn resets() -> Vec<Case> {
    let each = |count: u32, make: &dyn Fn(u32) -> Vec<u8>| -> Vec<u8> {
        (0..count).flat_map(|number| make(1 + 2 * number)).collect()
    };
    let reset = |stream: u32| frame(RST_STREAM, 0, stream, [0, 0, 0, 8]);
    let head = |stream: u32| frame(HEADERS, END_HEADERS, stream, request(&[]));
    let wrong = |stream: u32| frame(HEADERS, END_HEADERS | END_STREAM, stream, fields(&[("x", "y")]));
    let case = |name: &str, bytes: Vec<u8>, outcomes: &[Outcome]| {
        Case::new(
            format!("flood {name}"),
            vec![Step::Handshake(Vec::new()), Step::Send(bytes)],
            Expected::AnyOf(outcomes.to_vec()),
        )
    };
    let cut = [Outcome::ConnectionError];
    vec![
        case("of heads and resets", each(5_000, &|stream| [head(stream), reset(stream)].concat()), &cut),
        case(
            "of requests and resets",
            each(5_000, &|stream| [complete_request(stream), reset(stream)].concat()),
            &cut,
        ),
        case("of malformed heads", each(5_000, &wrong), &cut),
        case("of streams that stay open", each(1_000, &head), &[Outcome::Reset, Outcome::ConnectionError]),
        case(
            "of streams that a window update breaks",
            each(5_000, &|stream| [head(stream), window(stream, 0)].concat()),
            &[Outcome::ConnectionError],
        ),
        case(
            "of long SETTINGS, and a request",
            [settings(&[(0x99, 1); 2_000]).repeat(500), complete_request(1)].concat(),
            &[Outcome::Status(&[200]), Outcome::ConnectionError],
        ),
        case(
            "of three hundred requests",
            each(300, &complete_request),
            &[Outcome::Status(&[200]), Outcome::Reset],
        ),
    ]
}

/// Responses that the client does not read.
fn windows() -> Vec<Case> {
    let get = |path: &str| {
        let all = [
            (":method", "GET"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "x"),
            ("authorization", "Bearer attack-key"),
        ];
        frame(HEADERS, END_HEADERS | END_STREAM, 1, fields(&all))
    };
    let shut = |name: &str, bytes: Vec<u8>, outcomes: &[Outcome]| {
        let steps = vec![Step::Handshake(vec![(4, 0)]), Step::Send(bytes)];
        Case::new(format!("window 0 {name}"), steps, Expected::AnyOf(outcomes.to_vec()))
    };
    let answered = [Outcome::Status(&[200]), Outcome::Reset, Outcome::ConnectionError];
    vec![
        shut("and a POST", complete_request(1), &answered),
        shut("and a GET of info", get("/deployments/anywhere/info"), &answered),
        shut("and a GET of models", get("/v1/models"), &answered),
        shut(
            "and a GET of a missing path",
            get("/nothing"),
            &[Outcome::Status(&[404]), Outcome::Reset, Outcome::ConnectionError],
        ),
        shut("that opens byte by byte", [complete_request(1), window(1, 1).repeat(200)].concat(), &answered),
        Case::new(
            "window 0 and gone",
            vec![
                Step::Handshake(vec![(4, 0)]),
                Step::Send([get("/deployments/anywhere/info")].concat()),
                Step::Pause(Duration::from_millis(2_500)),
                Step::Abort,
            ],
            Expected::Nothing,
        ),
        Case::new(
            "window 0 with a hundred requests",
            vec![
                Step::Handshake(vec![(4, 0)]),
                Step::Send((0..100).flat_map(|number| complete_request(1 + 2 * number)).collect()),
                Step::Pause(Duration::from_millis(2_500)),
                Step::Abort,
            ],
            Expected::Nothing,
        ),
    ]
}
