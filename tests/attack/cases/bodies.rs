//! Bodies: invalid JSON, and JSON and gzip that cost more than their size.

use super::shown;
use crate::case::{BODY, Case, post};

/// Statuses for bodies that the gateway or the replica rejects.
const REJECTED: &[u16] = &[400, 404, 413, 422];
/// Statuses for bodies that may be served or not. The gateway looks for `model` and counts inputs, and leaves it to the
/// replica to reject invalid values, which the scripted replica here does not.
const ANY: &[u16] = &[200, 400, 404, 413, 422];

pub(super) fn cases() -> Vec<Case> {
    texts().into_iter().chain(nested()).chain(large()).chain(packed()).collect()
}

fn case(name: String, body: impl AsRef<[u8]>, responses: &'static [u16]) -> Case {
    Case::h1(format!("body {name}"), post("content-type: application/json\r\n", body), &[responses])
}

fn texts() -> Vec<Case> {
    let bodies: &[(&[u8], &'static [u16])] = &[
        (b"", REJECTED),
        (b" ", REJECTED),
        (b"{", REJECTED),
        (b"}", REJECTED),
        (b"{}", REJECTED),
        (b"[]", REJECTED),
        (b"null", REJECTED),
        (b"0", REJECTED),
        (b"\"x\"", REJECTED),
        (b"{}{}", REJECTED),
        (b"\0", REJECTED),
        (b"{\"model\": \"anywhere\", \"input\": \"x\"", REJECTED),
        (b"{\"model\": \"anywhere\", \"input\": \"x\"}}", REJECTED),
        (b"{\"model\": \"anywhere\", \"input\": \"x\"} x", REJECTED),
        (b"{\"model\": \"anywhere\", \"input\": \"x\",}", REJECTED),
        (b"{,\"model\": \"anywhere\", \"input\": \"x\"}", REJECTED),
        (b"{\"model\" \"anywhere\", \"input\": \"x\"}", REJECTED),
        (b"{\"model\": \"anywhere\" \"input\": \"x\"}", REJECTED),
        (b"{model: \"anywhere\", input: \"x\"}", REJECTED),
        (b"{'model': 'anywhere', 'input': 'x'}", REJECTED),
        (b"{\"model\": \"anywhere\", \"input\": \"x\"}//", REJECTED),
        (b"/**/{\"model\": \"anywhere\", \"input\": \"x\"}", REJECTED),
        (b"\xef\xbb\xbf{\"model\": \"anywhere\", \"input\": \"x\"}", ANY),
        (b"\xff\xfe{\0}\0", REJECTED),
        (b"{\"model\": \"anywhere\", \"input\": \"\xff\"}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": \"\xc0\xaf\"}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": \"\xed\xa0\x80\"}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": \"\n\"}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": \"\0\"}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": \"\\x\"}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": \"\\u12\"}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": \"\\u12g4\"}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": \"\\ud800\"}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": \"\\udc00\\ud800\"}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": \"\\u0000\"}", ANY),
        (b"{\"\\u006dodel\": \"anywhere\", \"input\": \"x\"}", &[200]),
        (b"{\"model\": \"\\u0061nywhere\", \"input\": \"x\"}", &[200]),
        (b"{\"model\": \"anywhere\", \"model\": \"anywhere\", \"input\": \"x\"}", ANY),
        (b"{\"model\": \"anywhere\", \"model\": \"nowhere\", \"input\": \"x\"}", ANY),
        (b"{\"model\": \"nowhere\", \"m\\u006fdel\": \"anywhere\", \"input\": \"x\"}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": \"x\", \"input\": [\"y\"]}", ANY),
        (b"{\"model\": null, \"input\": \"x\"}", REJECTED),
        (b"{\"model\": 1, \"input\": \"x\"}", REJECTED),
        (b"{\"model\": [\"anywhere\"], \"input\": \"x\"}", REJECTED),
        (b"{\"model\": \"\", \"input\": \"x\"}", REJECTED),
        (b"{\"model\": \"../anywhere\", \"input\": \"x\"}", REJECTED),
        (b"{\"model\": \"anywhere\\u0000\", \"input\": \"x\"}", REJECTED),
        (b"{\"model\": \"anywhere\\r\\nx: y\", \"input\": \"x\"}", REJECTED),
        (b"{\"MODEL\": \"anywhere\", \"input\": \"x\"}", REJECTED),
        (b"{\"input\": \"x\"}", REJECTED),
        (b"{\"model\": \"anywhere\", \"input\": 1e999999999}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": -0}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": NaN}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": Infinity}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": 01}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": +1}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": 1.}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": .5}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": tru}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": truee}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": undefined}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": [1 2]}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": [1,]}", ANY),
        (b"{\"model\": \"anywhere\", \"input\": [}", REJECTED),
        (b"{\"model\": \"anywhere\", \"input\": {]}", REJECTED),
        (b"<?xml version=\"1.0\"?><a/>", REJECTED),
        (b"model=anywhere&input=x", REJECTED),
        (b"--x\r\ncontent-disposition: form-data; name=model\r\n\r\nanywhere\r\n--x--", REJECTED),
    ];
    bodies.iter().map(|(body, responses)| case(format!("text {}", shown(body)), body, responses)).collect()
}

fn nested() -> Vec<Case> {
    let wrapped = |inner: &str| format!(r#"{{"model": "anywhere", "input": "x", "more": {inner}}}"#);
    let mut cases = Vec::new();
    for depth in [10, 62, 63, 64, 65, 1_000, 100_000] {
        let responses = if depth > 64 { REJECTED } else { ANY };
        let lists = "[".repeat(depth) + &"]".repeat(depth);
        let objects = r#"{"a":"#.repeat(depth) + "1" + &"}".repeat(depth);
        cases.push(case(format!("{depth} lists deep"), wrapped(&lists), responses));
        cases.push(case(format!("{depth} objects deep"), wrapped(&objects), responses));
    }
    cases.push(case("2 million open lists".to_owned(), "[".repeat(2_000_000), REJECTED));
    cases.push(case("500,000 open objects".to_owned(), r#"{"a":"#.repeat(500_000), REJECTED));
    cases
}

fn large() -> Vec<Case> {
    let keys: String = (0..50_000).map(|key| format!("\"k{key}\": {key}, ")).collect();
    let escaped: String = (0..30_000).map(|key| format!("\"\\u006b{key}\": {key}, ")).collect();
    let usual = |before: &str| format!("{{{before}\"model\": \"anywhere\", \"input\": \"x\"}}");
    vec![
        case("50,000 keys".to_owned(), usual(&keys), ANY),
        case("30,000 escaped keys".to_owned(), usual(&escaped), ANY),
        case("the same key 100,000 times".to_owned(), usual(&"\"k\": 1, ".repeat(100_000)), ANY),
        case("a key of 2 MB".to_owned(), usual(&format!("\"{}\": 1, ", "k".repeat(2 << 20))), ANY),
        case(
            "an escaped key of 2 MB".to_owned(),
            usual(&format!("\"{}\": 1, ", "\\u006b".repeat(350_000))),
            ANY,
        ),
        case(
            "a model of 1 MB".to_owned(),
            format!(r#"{{"model": "{}", "input": "x"}}"#, "m".repeat(1 << 20)),
            REJECTED,
        ),
        case("a number of 1 MB".to_owned(), usual(&format!("\"k\": {}, ", "1".repeat(1 << 20))), ANY),
        case("4 MB of white space".to_owned(), " ".repeat(4 << 20) + BODY, ANY),
        case(
            "4 MB of escapes".to_owned(),
            format!(r#"{{"model": "anywhere", "input": "{}"}}"#, "\\\"".repeat(2 << 20)),
            ANY,
        ),
        case(
            "100,000 empty inputs".to_owned(),
            format!(r#"{{"model": "anywhere", "input": [{}""]}}"#, r#""","#.repeat(99_999)),
            ANY,
        ),
        case("one more than 32 MB".to_owned(), vec![b' '; (32 << 20) + 1], &[413]),
    ]
}

/// Bodies in gzip (RFC 1952).
fn packed() -> Vec<Case> {
    let gzip = |name: &str, body: Vec<u8>, responses: &'static [u16]| {
        Case::h1(format!("gzip {name}"), post("content-encoding: gzip\r\n", body), &[responses])
    };
    let good = stored(BODY.as_bytes());
    let changed = |at: usize, to: u8| {
        let mut bytes = good.clone();
        bytes[at] = to;
        bytes
    };
    let tail = good.len() - 8;
    let bomb = spaces(40 << 20);
    vec![
        gzip("valid", good.clone(), &[200]),
        gzip("of nothing", Vec::new(), REJECTED),
        gzip("of an empty text", stored(b""), REJECTED),
        gzip("invalid", BODY.as_bytes().to_vec(), REJECTED),
        gzip("head alone", good[..10].to_vec(), REJECTED),
        gzip("half a head", good[..5].to_vec(), REJECTED),
        gzip("cut in the data", good[..tail - 5].to_vec(), REJECTED),
        gzip("cut in the trailer", good[..good.len() - 1].to_vec(), REJECTED),
        gzip("without a trailer", good[..tail].to_vec(), REJECTED),
        gzip("of another checksum", changed(tail, good[tail] ^ 1), REJECTED),
        gzip("of another length", changed(tail + 4, good[tail + 4] ^ 1), REJECTED),
        gzip("of another magic", changed(0, 0), REJECTED),
        gzip("of another method", changed(2, 9), REJECTED),
        gzip("with reserved flags", changed(3, 0xe0), REJECTED),
        gzip(
            "with a name that does not end",
            [&good[..3], &[8, 0, 0, 0, 0, 0, 3], &[b'x'; 5_000]].concat(),
            REJECTED,
        ),
        gzip(
            "with an extra field that is longer than all",
            [&good[..3], &[4, 0, 0, 0, 0, 0, 3, 0xff, 0xff], b"x"].concat(),
            REJECTED,
        ),
        gzip("of a reserved block", changed(10, 7), REJECTED),
        gzip("of a block whose lengths differ", changed(11, 0), REJECTED),
        gzip("of zlib", [&[0x78, 0x9c][..], &good[10..tail]].concat(), REJECTED),
        gzip("of raw deflate", good[10..tail].to_vec(), REJECTED),
        gzip("twice packed", stored(&good), REJECTED),
        gzip("with something behind it", [&good[..], b"more"].concat(), ANY),
        gzip("in two members", [stored(&BODY.as_bytes()[..9]), stored(&BODY.as_bytes()[9..])].concat(), ANY),
        gzip("in 20,000 empty members", stored(b"").repeat(20_000), REJECTED),
        gzip(
            "in 20,000 empty blocks",
            [&good[..10], &[0, 0, 0, 0xff, 0xff].repeat(20_000)[..], &good[10..]].concat(),
            ANY,
        ),
        gzip("bomb of 40 MB", bomb.clone(), &[400, 413]),
        gzip("bomb of bombs", bomb.repeat(3), &[400, 413]),
        gzip("bomb that is cut", bomb[..bomb.len() / 2].to_vec(), &[400, 413]),
        gzip("bomb just below the limit", spaces((32 << 20) - 100), REJECTED),
    ]
}

const GZIP_HEAD: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];

/// Returns a gzip member of one stored block.
fn stored(text: &[u8]) -> Vec<u8> {
    let length = text.len() as u16;
    let mut bytes = GZIP_HEAD.to_vec();
    bytes.push(1);
    bytes.extend(length.to_le_bytes());
    bytes.extend((!length).to_le_bytes());
    bytes.extend(text);
    bytes.extend(crc32(text.iter().copied()).to_le_bytes());
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes
}

/// Returns about `count` spaces: a literal and its repetitions, 13 bits for 258 of them, in Deflate's fixed code.
fn spaces(count: usize) -> Vec<u8> {
    let (mut bytes, mut bits, mut held) = (GZIP_HEAD.to_vec(), 0_u32, 0);
    let mut put = |value: u32, width: u32| {
        bits |= value << held;
        held += width;
        while held >= 8 {
            bytes.push(bits as u8);
            bits >>= 8;
            held -= 8;
        }
    };
    // The last block, in the fixed code; codes are written with their first bit first.
    put(0b011, 3);
    let code = |code: u32, width: u32| code.reverse_bits() >> (32 - width);
    put(code(0x30 + u32::from(b' '), 8), 8);
    let repeats = (count - 1) / 258;
    for _ in 0..repeats {
        put(code(0b1100_0101, 8), 8);
        put(code(0, 5), 5);
    }
    put(code(0, 7), 7);
    put(0, 7);
    let length = 1 + repeats * 258;
    bytes.extend(crc32(std::iter::repeat_n(b' ', length)).to_le_bytes());
    bytes.extend((length as u32).to_le_bytes());
    bytes
}

fn crc32(bytes: impl Iterator<Item = u8>) -> u32 {
    let table: Vec<u32> = (0..256)
        .map(|byte| {
            (0..8).fold(byte, |sum: u32, _| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 })
        })
        .collect();
    !bytes.fold(!0, |sum, byte| table[((sum ^ u32::from(byte)) & 0xff) as usize] ^ sum >> 8)
}
