//! Trace context: identifiers, and the headers in which they are propagated (W3C Trace Context).
//!
//! An invalid `traceparent` is ignored, and the request begins a new trace; its `tracestate` is dropped, as the
//! specification requires. Both headers are bounded, because they are sent on to regions.

use std::borrow::Cow;
use std::fmt;
use std::num::{NonZeroU64, NonZeroU128};

/// Longest `tracestate` that is propagated, in bytes: the minimum that the specification requires.
pub const TRACESTATE_BYTES_MAX: usize = 512;
/// Maximum number of members of a `tracestate`, by the specification.
pub const TRACESTATE_MEMBERS_MAX: usize = 32;
/// Length of a `traceparent` of version 00.
const TRACEPARENT_BYTES: usize = 55;
/// Flag of a sampled trace.
const SAMPLED: u8 = 1;

/// Identifier of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TraceId(NonZeroU128);

/// Identifier of a span within its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpanId(NonZeroU64);

impl TraceId {
    /// Makes an identifier of random bits.
    pub fn from_random(bits: u128) -> TraceId {
        TraceId(NonZeroU128::new(bits).unwrap_or(NonZeroU128::MIN))
    }

    /// Returns the identifier as a number.
    pub fn get(self) -> u128 {
        self.0.get()
    }

    /// Parses an identifier of 32 hexadecimal digits, as in headers and log lines.
    pub fn parse(text: &str) -> Option<TraceId> {
        let bits = (text.len() == 32).then(|| hexadecimal(text.as_bytes()))??;
        NonZeroU128::new(bits).map(TraceId)
    }

    /// Returns the identifier as in headers and log lines: 32 hexadecimal digits.
    pub fn text(self) -> String {
        let mut text = String::with_capacity(32);
        self.push_to(&mut text);
        text
    }

    fn push_to(self, text: &mut String) {
        for half in self.get().to_be_bytes().as_chunks::<8>().0 {
            push_hexadecimal(text, u64::from_be_bytes(*half));
        }
    }
}

impl SpanId {
    /// Makes an identifier of random bits.
    pub fn from_random(bits: u64) -> SpanId {
        SpanId(NonZeroU64::new(bits).unwrap_or(NonZeroU64::MIN))
    }

    /// Returns the identifier as a number.
    pub fn get(self) -> u64 {
        self.0.get()
    }

    /// Parses an identifier of 16 hexadecimal digits, as in headers and log lines.
    pub fn parse(text: &str) -> Option<SpanId> {
        let bits = (text.len() == 16).then(|| hexadecimal(text.as_bytes()))??;
        NonZeroU64::new(u64::try_from(bits).ok()?).map(SpanId)
    }

    /// Returns the identifier as in headers and log lines: 16 hexadecimal digits.
    pub fn text(self) -> String {
        let mut text = String::with_capacity(16);
        push_hexadecimal(&mut text, self.get());
        text
    }

    /// Returns the identifier of a span below this one. It follows from this span's random bits, so that a span which no
    /// other process refers to needs no identifier before it is exported.
    pub fn child(self, number: u64) -> SpanId {
        // The finalizer of SplitMix64: a bijection, so that the children of a span differ from each other.
        let mut bits = self.get() ^ number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        SpanId::from_random(bits ^ (bits >> 31))
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.get())
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.get())
    }
}

/// Position in a trace: a span, as other processes refer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// Trace.
    pub trace: TraceId,
    /// Span.
    pub span: SpanId,
    /// Whether the trace is exported.
    pub is_sampled: bool,
}

impl TraceContext {
    /// Parses a `traceparent`; `None` if it is invalid. Of a version after 00 the known fields are read.
    pub fn parse(header: &[u8]) -> Option<TraceContext> {
        let (known, rest) = header.split_at_checked(TRACEPARENT_BYTES)?;
        let [version @ .., _] = known.first_chunk::<3>()?;
        let version = u8::try_from(hexadecimal(version)?).ok()?;
        let is_complete = if version == 0 { rest.is_empty() } else { matches!(rest, [] | [b'-', ..]) };
        let has_dashes = [2, 35, 52].iter().all(|at| known[*at] == b'-');
        if version == u8::MAX || !is_complete || !has_dashes {
            return None;
        }
        let trace = NonZeroU128::new(hexadecimal(&known[3..35])?)?;
        let span = NonZeroU64::new(u64::try_from(hexadecimal(&known[36..52])?).ok()?)?;
        let flags = u8::try_from(hexadecimal(&known[53..])?).ok()?;
        Some(TraceContext {
            trace: TraceId(trace),
            span: SpanId(span),
            is_sampled: flags & SAMPLED == SAMPLED,
        })
    }

    /// Returns the value of the header `traceparent`.
    pub fn traceparent(&self) -> String {
        let mut text = String::with_capacity(TRACEPARENT_BYTES);
        text.push_str("00-");
        self.trace.push_to(&mut text);
        text.push('-');
        push_hexadecimal(&mut text, self.span.get());
        text.push_str(if self.is_sampled { "-01" } else { "-00" });
        text
    }
}

/// Returns the `tracestate` to propagate: the header's lines as one list, or `None` if it is empty, invalid or too long.
pub fn tracestate<'a>(lines: impl IntoIterator<Item = &'a [u8]>) -> Option<Cow<'a, str>> {
    let mut joined = Cow::Borrowed("");
    for line in lines {
        let line = std::str::from_utf8(line).ok()?;
        if joined.is_empty() {
            joined = Cow::Borrowed(line);
        } else {
            joined.to_mut().push(',');
            joined.to_mut().push_str(line);
        }
        if joined.len() > TRACESTATE_BYTES_MAX {
            return None;
        }
    }
    let members = || joined.split(',').map(|member| member.trim_matches([' ', '\t']));
    let is_valid = members().filter(|member| !member.is_empty()).all(is_member);
    let count = members().filter(|member| !member.is_empty()).count();
    (is_valid && (1..=TRACESTATE_MEMBERS_MAX).contains(&count)).then_some(joined)
}

/// Returns whether a member of a `tracestate` is `key=value` of the permitted characters.
fn is_member(member: &str) -> bool {
    let Some((key, value)) = member.split_once('=') else { return false };
    let is_key_byte = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-' | b'*' | b'/' | b'@')
    };
    let key_begins =
        key.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let is_value_byte = |byte: u8| matches!(byte, b' '..=b'~') && byte != b'=';
    key_begins
        && (1..=256).contains(&key.len())
        && (1..=256).contains(&value.len())
        && key.bytes().all(is_key_byte)
        && value.bytes().all(is_value_byte)
}

/// Reads a number of lower-case hexadecimal digits, as the specification requires.
fn hexadecimal(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0_u128, |number, digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(value))
    })
}

/// Returns the 16 hexadecimal digits of a number. Eight are computed at a time, without `core::fmt`: every attempt has a header,
/// also of requests that are not sampled.
fn hexadecimal_digits(number: u64) -> [u8; 16] {
    /// Repeats a byte eight times.
    const fn bytes(byte: u8) -> u64 {
        u64::from_ne_bytes([byte; 8])
    }
    let mut digits = [0; 16];
    for (eight, half) in digits.as_chunks_mut::<8>().0.iter_mut().zip([number >> 32, number & 0xffff_ffff]) {
        // One digit in each byte.
        let values = (half | half << 16) & 0x0000_ffff_0000_ffff;
        let values = (values | values << 8) & 0x00ff_00ff_00ff_00ff;
        let values = (values | values << 4) & bytes(0x0f);
        // 1 in each byte whose value is above 9.
        let letters = ((values + bytes(6)) >> 4) & bytes(1);
        *eight = (values + bytes(b'0') + letters * u64::from(b'a' - b'9' - 1)).to_be_bytes();
    }
    digits
}

/// Appends a number of 16 hexadecimal digits.
fn push_hexadecimal(text: &mut String, number: u64) {
    text.push_str(std::str::from_utf8(&hexadecimal_digits(number)).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_valid_header_is_read_and_written_unchanged() {
        for header in [VALID, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"] {
            let context = TraceContext::parse(header.as_bytes()).expect(header);
            assert_eq!(context.traceparent(), header);
            assert_eq!(context.trace.to_string(), &header[3..35]);
            assert_eq!(context.trace.text(), &header[3..35]);
            assert_eq!(context.span.to_string(), &header[36..52]);
            assert_eq!(context.span.text(), &header[36..52]);
            assert_eq!(TraceId::parse(&header[3..35]), Some(context.trace));
            assert_eq!(SpanId::parse(&header[36..52]), Some(context.span));
        }
        let later = "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03-what-the-future-has";
        assert!(TraceContext::parse(later.as_bytes()).is_some_and(|context| context.is_sampled));
    }

    #[test]
    fn an_invalid_header_is_rejected() {
        let zeros = (&"0".repeat(32), &"0".repeat(16));
        let changed = |from: &str, to: &str| VALID.replace(from, to);
        for header in [
            String::new(),
            "00".to_owned(),
            VALID[..54].to_owned(),
            format!("{VALID}0"),
            format!("{VALID}-00"),
            format!("cc{}x", &VALID[2..]),
            format!("ff{}", &VALID[2..]),
            changed("0af7651916cd43dd8448eb211c80319c", zeros.0),
            changed("b7ad6b7169203331", zeros.1),
            changed("0af7", "0AF7"),
            changed("b7ad", "b7ag"),
            changed("00-", "00_"),
            VALID.replace('-', " "),
            changed("-01", "-0x"),
            format!("00-{}", "é".repeat(26)),
        ] {
            assert_eq!(TraceContext::parse(header.as_bytes()), None, "{header}");
        }
    }

    #[test]
    fn an_invalid_identifier_is_rejected() {
        for text in
            ["".to_owned(), "é".repeat(16), "A".repeat(32), "0".repeat(32), "1".repeat(31), "1".repeat(33)]
        {
            assert_eq!(TraceId::parse(&text), None, "{text}");
        }
        for text in
            ["".to_owned(), "é".repeat(8), "A".repeat(16), "0".repeat(16), "1".repeat(15), "1".repeat(17)]
        {
            assert_eq!(SpanId::parse(&text), None, "{text}");
        }
    }

    #[test]
    fn a_tracestate_is_propagated_up_to_its_limits_and_dropped_past_them() {
        let one = |text: &str| tracestate([text.as_bytes()]).map(Cow::into_owned);
        assert_eq!(one("a=1,b@c=2 3").as_deref(), Some("a=1,b@c=2 3"));
        assert_eq!(tracestate([&b"a=1"[..], b"b=2"]).as_deref(), Some("a=1,b=2"));
        assert_eq!(tracestate([]), None);
        let members = |count: usize| vec!["a=1"; count].join(",");
        assert!(one(&members(TRACESTATE_MEMBERS_MAX)).is_some());
        assert!(one(&members(TRACESTATE_MEMBERS_MAX + 1)).is_none());
        let long = |length: usize| format!("a={},b={}", "x".repeat(250), "y".repeat(length - 255));
        assert!(one(&long(TRACESTATE_BYTES_MAX - 6)).is_some_and(|state| state.len() < TRACESTATE_BYTES_MAX));
        let three =
            |last: usize| format!("a={},b={},c={}", "x".repeat(200), "y".repeat(200), "z".repeat(last));
        assert!(one(&three(TRACESTATE_BYTES_MAX - 408)).is_some_and(|it| it.len() == TRACESTATE_BYTES_MAX));
        assert!(one(&three(TRACESTATE_BYTES_MAX - 407)).is_none());
        for wrong in ["", "a", "a=", "A=1", "=1", "a=1=2", "a=\u{7f}", "a=é", "a b=1"] {
            assert!(one(wrong).is_none(), "{wrong}");
        }
        assert!(tracestate([&b"\xff=1"[..]]).is_none());
    }

    #[test]
    fn the_children_of_a_span_differ() {
        let span = SpanId::from_random(7);
        let mut children: Vec<_> = (0..1000).map(|number| span.child(number)).collect();
        children.push(span);
        children.sort();
        children.dedup();
        assert_eq!(children.len(), 1001);
        assert_eq!((SpanId::from_random(0).get(), TraceId::from_random(0).get()), (1, 1), "never zero");
    }

    proptest! {
        #[test]
        fn no_header_panics_and_an_accepted_one_is_well_formed(header in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Some(context) = TraceContext::parse(&header) {
                prop_assert_eq!(TraceContext::parse(context.traceparent().as_bytes()), Some(context));
            }
            if let Some(state) = tracestate([&header[..]]) {
                prop_assert!(state.len() <= TRACESTATE_BYTES_MAX && state.is_ascii());
            }
        }

        #[test]
        fn a_context_survives_its_header(trace: u128, span: u64, is_sampled: bool) {
            let context = TraceContext {
                trace: TraceId::from_random(trace), span: SpanId::from_random(span), is_sampled
            };
            prop_assert_eq!(TraceContext::parse(context.traceparent().as_bytes()), Some(context));
        }
    }
}
