//! Rejection of pseudo-headers in the trailers of HTTP/2 requests, which RFC 9113 (8.1) forbids and the `h2` library
//! drops silently.
//!
//! A trailer `:path` that one reader ignores and another accepts is a second request line. So the header blocks of a
//! connection are inspected as they come: in trailers with a pseudo-header the flag `END_STREAM` is cleared, which
//! makes them malformed for the library too, and it resets only that stream (`PROTOCOL_ERROR`).
//!
//! Of HPACK (RFC 7541) only the size of a field and whether it is a pseudo-header are decoded: no text is stored.

use crate::frame::{END_STREAM, FRAME_HEADER_BYTES, FrameHeader, PREFACE_BYTES};
use std::collections::VecDeque;

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Offset of the flags in a frame.
const FLAGS_AT: usize = 4;
/// Maximum bytes of incomplete header blocks: more than the library accepts of one.
pub const INCOMPLETE_BYTES_MAX: usize = 80 << 10;
/// Size of the dynamic table for clients (`SETTINGS_HEADER_TABLE_SIZE`, which has its default).
const TABLE_BYTES_MAX: usize = 4096;
/// Overhead of an entry in addition to its name and value (RFC 7541, 4.1).
const ENTRY_BYTES: usize = 32;
/// Number of pseudo-headers at the start of the static table.
const STATIC_PSEUDO_MAX: usize = 14;
/// Lengths of the names in the static table (RFC 7541, A), from entry 1.
const STATIC_NAMES: [u8; 61] = [
    10, 7, 7, 5, 5, 7, 7, 7, 7, 7, 7, 7, 7, 7, 14, 15, 15, 13, 6, 27, 3, 5, 13, 13, 19, 16, 16, 14, 16, 13,
    12, 6, 4, 4, 6, 7, 4, 4, 8, 17, 13, 8, 19, 13, 4, 8, 12, 18, 19, 5, 7, 7, 11, 6, 10, 25, 17, 10, 4, 3,
    16,
];
/// Number of Huffman codes (RFC 7541, B) of each length; the code is canonical, so this determines where each length
/// starts.
const CODES: [u32; 31] =
    [0, 0, 0, 0, 0, 10, 26, 32, 6, 0, 5, 3, 2, 6, 2, 3, 0, 0, 0, 3, 8, 13, 26, 29, 12, 4, 15, 19, 29, 0, 4];
/// Huffman code of `:`, and its length.
const COLON: (u32, usize) = (0x5c, 7);

/// Scanner of the frames of one connection.
#[derive(Clone, Debug)]
pub struct Guard {
    /// Bytes up to the next frame.
    skip: usize,
    last_stream: u32,
    table: DynamicTable,
    /// The bytes were not HTTP/2: the library ends the connection, and nothing is inspected any more.
    is_disabled: bool,
}

impl Default for Guard {
    fn default() -> Guard {
        Guard { skip: PREFACE_BYTES, last_stream: 0, table: DynamicTable::default(), is_disabled: false }
    }
}

/// A field is not valid HPACK.
struct InvalidHpack;

impl Guard {
    /// Inspects the next bytes of the connection and returns how many of them may be read. The rest is the beginning of
    /// a header block, to be passed again together with more bytes.
    pub fn scan(&mut self, bytes: &mut [u8]) -> usize {
        let mut at = 0;
        while !self.is_disabled {
            let skipped = self.skip.min(bytes.len() - at);
            self.skip -= skipped;
            at += skipped;
            let Some(frame) = frame_header(&bytes[at..]) else {
                return at;
            };
            if frame.kind != HEADERS {
                self.skip = FRAME_HEADER_BYTES + frame.length;
                continue;
            }
            match block(&bytes[at..], frame) {
                Ok(None) if bytes.len() - at <= INCOMPLETE_BYTES_MAX => return at,
                Ok(None) => self.is_disabled = true,
                Ok(Some(Block { length, fields })) => {
                    let is_trailers = frame.stream <= self.last_stream;
                    self.last_stream = self.last_stream.max(frame.stream);
                    match self.table.has_pseudo_header(&fields) {
                        Ok(found) if found && is_trailers => bytes[at + FLAGS_AT] &= !END_STREAM,
                        Ok(_) => {}
                        Err(InvalidHpack) => self.is_disabled = true,
                    }
                    at += length;
                }
                Err(InvalidHpack) => self.is_disabled = true,
            }
        }
        bytes.len()
    }
}

/// Returns the frame header at the start of `bytes`; `None` while it is incomplete.
fn frame_header(bytes: &[u8]) -> Option<FrameHeader> {
    bytes.first_chunk().copied().map(FrameHeader::new)
}

/// Complete header block: the length of its frames, and its content.
struct Block {
    length: usize,
    fields: Vec<u8>,
}

/// Returns the block that begins with the frame `first`; `None` while it is incomplete.
fn block(bytes: &[u8], first: FrameHeader) -> Result<Option<Block>, InvalidHpack> {
    let (mut frame, mut at, mut fields) = (first, 0, Vec::new());
    loop {
        let Some(mut payload) = bytes.get(at + FRAME_HEADER_BYTES..at + FRAME_HEADER_BYTES + frame.length)
        else {
            return Ok(None);
        };
        if frame.kind == HEADERS {
            if frame.flags & PADDED != 0 {
                let (padding, rest) = payload.split_first().ok_or(InvalidHpack)?;
                payload = rest.get(..rest.len().wrapping_sub(usize::from(*padding))).ok_or(InvalidHpack)?;
            }
            if frame.flags & PRIORITY != 0 {
                payload = payload.get(5..).ok_or(InvalidHpack)?;
            }
        }
        fields.extend_from_slice(payload);
        at += FRAME_HEADER_BYTES + frame.length;
        if frame.flags & END_HEADERS != 0 {
            return Ok(Some(Block { length: at, fields }));
        }
        let Some(next) = frame_header(&bytes[at..]) else { return Ok(None) };
        if next.kind != CONTINUATION || next.stream != first.stream {
            return Err(InvalidHpack);
        }
        frame = next;
    }
}

/// Dynamic table of a connection (RFC 7541, 2.3.2), newest entry first.
#[derive(Clone, Debug)]
struct DynamicTable {
    entries: VecDeque<Entry>,
    bytes: usize,
    bytes_max: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    is_pseudo: bool,
    name_bytes: usize,
    bytes: usize,
}

impl Default for DynamicTable {
    fn default() -> DynamicTable {
        DynamicTable { entries: VecDeque::new(), bytes: 0, bytes_max: TABLE_BYTES_MAX }
    }
}

impl DynamicTable {
    /// Reads a header block; returns whether it has a pseudo-header.
    fn has_pseudo_header(&mut self, mut block: &[u8]) -> Result<bool, InvalidHpack> {
        let mut found = false;
        while let [first, ..] = block {
            match first {
                0x80.. => found |= self.name(integer(&mut block, 7)?)?.0,
                0x40.. => {
                    let (is_pseudo, name_bytes) = self.field_name(&mut block, 6)?;
                    let (_, value_bytes) = text(&mut block)?;
                    self.insert(Entry {
                        is_pseudo,
                        name_bytes,
                        bytes: name_bytes + value_bytes + ENTRY_BYTES,
                    });
                    found |= is_pseudo;
                }
                0x20.. => {
                    self.bytes_max = integer(&mut block, 5)?;
                    if self.bytes_max > TABLE_BYTES_MAX {
                        return Err(InvalidHpack);
                    }
                    self.evict();
                }
                _ => {
                    found |= self.field_name(&mut block, 4)?.0;
                    text(&mut block)?;
                }
            }
        }
        Ok(found)
    }

    /// Returns whether the name of a literal field is that of a pseudo-header, and its length.
    fn field_name(&self, block: &mut &[u8], prefix: u32) -> Result<(bool, usize), InvalidHpack> {
        match integer(block, prefix)? {
            0 => text(block),
            index => self.name(index),
        }
    }

    fn name(&self, index: usize) -> Result<(bool, usize), InvalidHpack> {
        if let Some(length) = STATIC_NAMES.get(index.wrapping_sub(1)) {
            return Ok((index <= STATIC_PSEUDO_MAX, usize::from(*length)));
        }
        let entry = self.entries.get(index.wrapping_sub(STATIC_NAMES.len() + 1)).ok_or(InvalidHpack)?;
        Ok((entry.is_pseudo, entry.name_bytes))
    }

    fn insert(&mut self, entry: Entry) {
        self.bytes += entry.bytes;
        self.entries.push_front(entry);
        self.evict();
    }

    fn evict(&mut self) {
        while self.bytes > self.bytes_max {
            let Some(oldest) = self.entries.pop_back() else { return };
            self.bytes -= oldest.bytes;
        }
    }
}

/// Reads an integer with this prefix length (RFC 7541, 5.1).
fn integer(block: &mut &[u8], prefix: u32) -> Result<usize, InvalidHpack> {
    let mut next = || {
        let (first, rest) = block.split_first().ok_or(InvalidHpack)?;
        *block = rest;
        Ok(usize::from(*first))
    };
    let prefix_max = (1 << prefix) - 1;
    let mut number = next()? & prefix_max;
    if number < prefix_max {
        return Ok(number);
    }
    for shift in [0, 7, 14, 21] {
        let byte = next()?;
        number += (byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(InvalidHpack)
}

/// Reads a string (RFC 7541, 5.2); returns whether it begins with a colon, and its length.
fn text(block: &mut &[u8]) -> Result<(bool, usize), InvalidHpack> {
    let is_huffman_coded = block.first().ok_or(InvalidHpack)? & 0x80 != 0;
    let length = integer(block, 7)?;
    let (text, rest) = block.split_at_checked(length).ok_or(InvalidHpack)?;
    *block = rest;
    if is_huffman_coded { huffman_decoded(text) } else { Ok((text.first() == Some(&b':'), length)) }
}

/// Decodes the same of a Huffman-coded string.
fn huffman_decoded(encoded: &[u8]) -> Result<(bool, usize), InvalidHpack> {
    let (mut letters, mut begins_with_colon) = (0, false);
    let (mut code, mut length, mut first) = (0_u32, 0, 0_u32);
    for bit in
        encoded.iter().flat_map(|byte| (0..8).rev().map(move |position| u32::from(byte >> position & 1)))
    {
        code = code << 1 | bit;
        length += 1;
        let codes = *CODES.get(length).ok_or(InvalidHpack)?;
        first <<= 1;
        if code.wrapping_sub(first) < codes {
            begins_with_colon |= letters == 0 && (code, length) == COLON;
            letters += 1;
            (code, length, first) = (0, 0, 0);
        } else {
            first += codes;
        }
    }
    Ok((begins_with_colon, letters))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> =
            text.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    }

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    /// The three requests of RFC 7541, C.3 (plain) and C.4 (Huffman-coded), and the size of the table after each.
    #[test]
    fn the_table_is_as_large_as_in_the_examples_of_the_standard() {
        let plain = [
            "828684410f7777772e6578616d706c652e636f6d",
            "828684be58086e6f2d6361636865",
            "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
        ];
        let encoded = [
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            "828684be5886a8eb10649cbf",
            "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        ];
        for requests in [plain, encoded] {
            let mut table = DynamicTable::default();
            for (request, bytes) in requests.into_iter().zip([57, 110, 164]) {
                assert!(table.has_pseudo_header(&hex(request)).is_ok_and(|found| found), "{request}");
                assert_eq!(table.bytes, bytes, "{request}");
            }
            let names: Vec<_> =
                table.entries.iter().map(|entry| (entry.is_pseudo, entry.name_bytes)).collect();
            assert_eq!(names, [(false, 10), (false, 13), (true, 10)]);
        }
    }

    const REQUEST: &str = "828684410f7777772e6578616d706c652e636f6d";

    /// Returns the flags of the frame of `trailers` after a request, checked at once and in reads of every size.
    #[track_caller]
    fn flags(trailers: &str) -> u8 {
        let request = frame(HEADERS, END_HEADERS, 1, &hex(REQUEST));
        let data = frame(0, 0, 1, b"body");
        let sent = frame(HEADERS, END_HEADERS | END_STREAM, 1, &hex(trailers));
        let before = [&[0; PREFACE_BYTES], request.as_slice(), &data].concat();
        let all = [before.as_slice(), &sent, &frame(6, 0, 0, &[0; 8])].concat();
        let mut whole = all.clone();
        assert_eq!(Guard::default().scan(&mut whole), all.len());
        for size in [1, 2, 9, 10, 33] {
            let (mut guard, mut buffered, mut read) = (Guard::default(), Vec::new(), Vec::new());
            for bytes in all.chunks(size) {
                buffered.extend_from_slice(bytes);
                let released = guard.scan(&mut buffered);
                read.extend(buffered.drain(..released));
            }
            assert_eq!(read, whole, "{trailers} in reads of {size}");
        }
        whole[before.len() + FLAGS_AT]
    }

    #[test]
    fn trailers_with_a_pseudo_header_do_not_end_their_stream_and_others_do() {
        let (kept, cleared) = (END_HEADERS | END_STREAM, END_HEADERS);
        for (trailers, flags_read) in [
            // x-a: b; plain, Huffman-coded, with a name of the static table, and of the dynamic one.
            ("0003782d610162", kept),
            ("0f0d0131", kept),
            ("", kept),
            // :path: / in all possible representations.
            ("84", cleared),
            ("04012f", cleared),
            ("14012f", cleared),
            ("44012f", cleared),
            ("00053a7061746801 2f", cleared),
            ("0084b958d33f8163", cleared),
            ("be", cleared),
            ("7e0162", cleared),
            ("0003782d61016284", cleared),
        ] {
            assert_eq!(flags(trailers), flags_read, "{trailers}");
        }
    }

    #[test]
    fn invalid_http_2_is_left_to_the_library() {
        for block in ["ff", "c0", "3fffff7f", "00", "0005", "7fffffffffff"] {
            let mut all = [vec![0; PREFACE_BYTES], frame(HEADERS, END_HEADERS, 1, &hex(block))].concat();
            let mut guard = Guard::default();
            assert_eq!(guard.scan(&mut all), all.len(), "{block}");
            assert!(guard.is_disabled, "{block}");
        }
        let mut endless = [vec![0; PREFACE_BYTES], frame(HEADERS, 0, 1, &hex(REQUEST))].concat();
        let mut guard = Guard::default();
        assert_eq!(guard.scan(&mut endless), PREFACE_BYTES, "it is incomplete");
        let mut buffered = endless.split_off(PREFACE_BYTES);
        while buffered.len() <= INCOMPLETE_BYTES_MAX {
            buffered.extend(frame(CONTINUATION, 0, 1, &[0; 1000]));
        }
        assert_eq!(guard.scan(&mut buffered), buffered.len(), "up to the limit");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), kind in 0_u8..10, flags: u8) {
            let mut all = [vec![0; PREFACE_BYTES], frame(kind, flags, 1, &bytes), bytes.clone()].concat();
            let length = all.len();
            prop_assert!(Guard::default().scan(&mut all) <= length);
            prop_assert_eq!(all.len(), length);
        }
    }
}
