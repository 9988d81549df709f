//! Search for responses that break the parser: valid ones, damaged in critical positions, and read in random pieces.
//!
//! * No bytes make it panic.
//! * The split of the bytes into reads makes no difference.
//! * A valid response gives its status and its body, and exactly its bytes are consumed.
//! * A response is the same without the bytes after its end.
//! * A head that `httparse` rejects is rejected; one that it accepts is accepted, or rejected for a stated reason.
//!
//! A response depends only on the seed and its number; both are printed if one fails. `HTTP1_FUZZ_RESPONSES` and
//! `HTTP1_FUZZ_SEED` change the number of responses and the seed.

use super::response::assemble;
use http1::{BodyPart, FramingError, HEADERS_MAX, head};

/// Responses of a usual test run, some seconds without optimization.
const RESPONSES: u64 = 30_000;

/// SplitMix64 random generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(mixed ^ (mixed >> 31)) * bound as u128) >> 64) as usize
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }

    fn of<'a, T: ?Sized>(&mut self, choices: &[&'a T]) -> &'a T {
        choices[self.below(choices.len())]
    }
}

/// Valid response, and the expected result.
struct Valid {
    bytes: Vec<u8>,
    status: u16,
    body: Vec<u8>,
    /// Whether the end of the connection ends the body.
    until_closed: bool,
}

fn valid(random: &mut Random) -> Valid {
    let mut bytes = Vec::new();
    for _ in 0..random.below(4).saturating_sub(1) {
        bytes.extend_from_slice(
            random
                .of(&[
                    "HTTP/1.1 100 Continue\r\n\r\n",
                    "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n",
                    "HTTP/1.1 102 \r\na: b\r\n\r\n",
                ])
                .as_bytes(),
        );
    }
    let status = [200, 200, 200, 204, 304, 429, 500, 999][random.below(8)];
    let version = random.of(&["1.1", "1.1", "1.1", "1.0"]);
    bytes.extend_from_slice(format!("HTTP/{version} {status} Reason\r\n").as_bytes());
    let body: Vec<u8> =
        (0..random.below(60)).map(|_| random.of(&[b"x", b"\r", b"\n", b"0", b"\xff"])[0]).collect();
    let framing = random.below(3);
    for _ in 0..random.below(5) {
        bytes.extend_from_slice(
            random
                .of(&[
                    "content-type: application/json\r\n",
                    "x-empty:\r\n",
                    "server-timing: total;dur=1.5\r\n",
                    "Connection: keep-alive\r\n",
                    "connection: x, close\r\n",
                    "X-Meridian-Region: aws/us-east-1  \r\n",
                    "x: \u{e9}\r\n",
                ])
                .as_bytes(),
        );
    }
    match framing {
        0 => bytes.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes()),
        1 => bytes.extend_from_slice(b"transfer-encoding: Chunked\r\n"),
        _ => {}
    }
    bytes.extend_from_slice(b"\r\n");
    if matches!(status, 204 | 304) {
        return Valid { bytes, status, body: Vec::new(), until_closed: false };
    }
    if framing != 1 {
        bytes.extend_from_slice(&body);
        return Valid { bytes, status, body, until_closed: framing == 2 };
    }
    let mut rest = body.as_slice();
    while !rest.is_empty() {
        let (chunk, after) = rest.split_at(1 + random.below(rest.len()));
        let extension = random.of(&["", "", ";a", ";a=\"b c\"", " ", "\t;x=y"]);
        bytes.extend_from_slice(format!("{:x}{extension}\r\n", chunk.len()).as_bytes());
        bytes.extend_from_slice(chunk);
        bytes.extend_from_slice(b"\r\n");
        rest = after;
    }
    bytes.extend_from_slice(
        random.of(&["0\r\n\r\n", "000;x\r\n\r\n", "0\r\nx-trailer: y\r\nz:\r\n\r\n"]).as_bytes(),
    );
    Valid { bytes, status, body, until_closed: false }
}

/// Text that is inserted as damage.
const TOKENS: [&str; 24] = [
    "\r\n",
    "\n",
    "\r",
    "\r\n ",
    "\r\n\r\n",
    " ",
    "\t",
    "\0",
    ":",
    ";",
    ",",
    "0",
    "f",
    "ffffffffffffffff",
    "content-length: 5\r\n",
    "content-length: 50\r\n",
    "transfer-encoding: chunked\r\n",
    "transfer-encoding: gzip, chunked\r\n",
    "connection: close\r\n",
    "HTTP/1.1 200 OK\r\n\r\n",
    "HTTP/1.1 101 Switch\r\n\r\n",
    "0\r\n\r\n",
    "a: b\r\n",
    "\u{1F600}",
];

fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    match random.below(7) {
        0 => drop(bytes.drain(at..(at + 1 + random.below(3)).min(bytes.len()))),
        1 => bytes.truncate(at),
        2 => bytes.insert(at, random.below(256) as u8),
        3 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        4 => {
            // Copies a part to another position: duplicate headers, shifted chunks.
            let end = (at + random.below(40)).min(bytes.len());
            let part = bytes[at..end].to_vec();
            let to = random.below(bytes.len() + 1);
            bytes.splice(to..to, part);
        }
        5 if random.one_in(8) => {
            let many = b"a: b\r\n".repeat(HEADERS_MAX - 4 + random.below(8));
            drop(bytes.splice(at..at, many));
        }
        _ => drop(bytes.splice(at..at, random.of(&TOKENS).bytes())),
    }
}

/// Returns the number of bytes that a complete response consumes.
fn consumed(bytes: &[u8]) -> Result<Option<usize>, FramingError> {
    let Some((mut framing, mut at)) = head(bytes, false, |head| (head.framing, head.length))? else {
        return Ok(None);
    };
    loop {
        let BodyPart { skipped, data } = framing.next(&bytes[at..])?;
        at += skipped + data;
        if skipped + data == 0 {
            return Ok(framing.is_done().then_some(at));
        }
    }
}

/// Compares the parser with the head tokenizer, response by response.
fn agrees_with_httparse(bytes: &[u8]) -> Result<(), String> {
    let ours = head(bytes, false, |head| head.length);
    let mut at = 0;
    loop {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut response = httparse::Response::new(&mut headers);
        let (theirs, status) = (response.parse(&bytes[at..]), response.code);
        match (theirs, &ours) {
            (Ok(httparse::Status::Complete(length)), ours) => {
                at += length;
                match ours {
                    Ok(Some(ours)) if *ours == at => return Ok(()),
                    Err(FramingError("its head is not HTTP/1.1")) | Ok(_)
                        if !matches!(status, Some(100..200)) =>
                    {
                        return Err(format!("httparse accepts {at} bytes, and the result is {ours:?}"));
                    }
                    Err(_) if !matches!(status, Some(100..200)) => return Ok(()),
                    _ => {}
                }
            }
            (Ok(httparse::Status::Partial), Ok(None)) | (_, Err(_)) => return Ok(()),
            (theirs, ours) => return Err(format!("httparse returns {theirs:?}, and the result is {ours:?}")),
        }
    }
}

fn check(random: &mut Random) -> Result<(), String> {
    let Valid { mut bytes, status, body, until_closed } = valid(random);
    let pieces: Vec<usize> = (0..8).map(|_| 1 + random.below(20)).collect();
    let complete = assemble(&bytes, &pieces, until_closed);
    match &complete {
        Ok(Some((got_status, got_body, _))) if (*got_status, got_body) == (status, &body) => {}
        other => return Err(format!("valid response {:?}: {other:?}", bytes.escape_ascii().to_string())),
    }
    if !until_closed && consumed(&bytes) != Ok(Some(bytes.len())) {
        return Err(format!("not all of {} is consumed", bytes.escape_ascii()));
    }
    bytes.extend(std::iter::repeat_n(b'H', random.below(3)));
    for _ in 0..=random.below(4) {
        let shown = || bytes.escape_ascii().to_string();
        let whole = assemble(&bytes, &[bytes.len().max(1)], true);
        let in_pieces = assemble(&bytes, &pieces, true);
        // Unlike the rest, unsolicited bytes are visible only if they arrived.
        let response = |result: &Result<_, _>| match result {
            Ok(Some((status, body, _))) => Ok(Some((*status, Vec::clone(body)))),
            Ok(None) => Ok(None),
            Err(error) => Err(*error),
        };
        if response(&whole) != response(&in_pieces) {
            return Err(format!("{}: at once {whole:?}, in pieces {in_pieces:?}", shown()));
        }
        agrees_with_httparse(&bytes).map_err(|problem| format!("{}: {problem}", shown()))?;
        if let Ok(Some(end)) = consumed(&bytes) {
            let alone = assemble(&bytes[..end], &[end], false);
            let incomplete = assemble(&bytes[..end - 1], &[end], false);
            if response(&alone) != response(&whole) || !matches!(incomplete, Ok(None)) {
                return Err(format!("{}: ends at {end}; parsed separately it is {alone:?}", shown()));
            }
        }
        damage(&mut bytes, random);
    }
    Ok(())
}

#[test]
fn damaged_responses_are_rejected_or_read_as_any_other_split_reads_them() {
    let option = |name, default| std::env::var(name).map_or(default, |text| text.parse().expect("a number"));
    let (responses, seed) = (option("HTTP1_FUZZ_RESPONSES", RESPONSES), option("HTTP1_FUZZ_SEED", 1));
    for number in 0..responses {
        let mut random = Random(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d));
        if let Err(problem) = check(&mut random) {
            panic!("seed {seed}, response {number}: {problem}");
        }
    }
}
