//! Validation of a row of numbers without parsing them.
//!
//! A response consists almost entirely of digits. A row in plain notation (no exponent, no space) is therefore
//! processed 64 bytes at a time: digits, points, signs and commas become 64-bit masks, and the JSON grammar of numbers
//! becomes conditions on neighbouring bits, that is, on a mask and the same mask shifted by one. Addition ensures that
//! a number has at most one point: a one added at the first digit after a point carries through the digits and appears
//! at their end. For rows in other notation the result is `None`, and they are parsed number by number elsewhere; so
//! the only other result is the number of values of a valid row.
//!
//! A number with a point is finite unless it has 39 digits before the point. 39 consecutive digits cover at least 20
//! bytes of one block at any alignment, and rows with 20 consecutive digits in a block are not considered plain.

use super::masks::{BLOCK, Masks};

/// Plain row. `bytes` counts from the byte after the opening bracket to the closing bracket, inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlainRow {
    pub(super) numbers: usize,
    pub(super) bytes: usize,
}

/// State at the end of a block that affects the first byte of the next, in the lowest bit.
#[derive(Clone, Copy)]
struct CarryBits {
    /// A number begins.
    begins: u64,
    minus: u64,
    point: u64,
    digit: u64,
    /// A leading zero, after which no digit may precede the point.
    lone_zero: u64,
    /// The fraction digits continue.
    fraction: u64,
}

/// Processes the row at the front of `text`, after its opening bracket.
pub(super) fn count_plain(text: &[u8]) -> Option<PlainRow> {
    let mut carry = CarryBits { begins: 1, minus: 0, point: 0, digit: 0, lone_zero: 0, fraction: 0 };
    let (blocks, rest) = text.as_chunks::<BLOCK>();
    let mut numbers = 0;
    for (index, block) in blocks.iter().enumerate() {
        let (commas, ends) = process_block(Masks::of(block), &mut carry)?;
        numbers += commas;
        if let Some(ends) = ends {
            return Some(PlainRow { numbers: numbers + 1, bytes: index * BLOCK + ends });
        }
    }
    let mut last = [0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    // The zero padding is not part of any number: a plain row ends before it.
    let (commas, ends) = process_block(Masks::of(&last), &mut carry)?;
    Some(PlainRow { numbers: numbers + commas + 1, bytes: blocks.len() * BLOCK + ends? })
}

/// Processes a block; returns the number of commas, and the end of the row if it is in this block. `None` if not plain.
fn process_block(masks: Masks, carry: &mut CarryBits) -> Option<(usize, Option<usize>)> {
    // Bits up to and including the first closing bracket.
    let within = masks.close ^ masks.close.wrapping_sub(1);
    let Masks { digit, zero, comma, minus, point, close } = masks.within(within);
    if masks.any() & within != within {
        return None;
    }
    let after = |bits: u64, carried: u64| bits << 1 | carried;
    let begins = after(comma, carry.begins);
    let after_minus = after(minus, carry.minus);
    let after_point = after(point, carry.point);
    let after_digit = after(digit, carry.digit);
    let lone_zero = (begins | after_minus) & zero;
    let after_lone_zero = after(lone_zero, carry.lone_zero);
    // Numbers begin with a digit or a sign, and a sign occurs only there.
    let wrong_begin = (begins & !(digit | minus)) | (minus & !begins) | (after_minus & !digit);
    // A point has a digit on both sides, and a number ends with a digit.
    let wrong_point = (after_point & !digit) | ((point | comma | close) & !after_digit);
    let (out, overflow) = digit.overflowing_add(after_point | carry.fraction);
    let second_point = out & !digit & point;
    // Bits after the closing bracket are ignored.
    if (wrong_begin | wrong_point | second_point | (after_lone_zero & digit)) & within != 0 {
        return None;
    }
    let whole = digit & out;
    if has_twenty(whole) {
        return None;
    }
    *carry = CarryBits {
        begins: comma >> 63,
        minus: minus >> 63,
        point: point >> 63,
        digit: digit >> 63,
        lone_zero: lone_zero >> 63,
        fraction: u64::from(overflow),
    };
    Some((comma.count_ones() as usize, (close != 0).then(|| close.trailing_zeros() as usize + 1)))
}

/// Returns whether twenty consecutive bits are set.
fn has_twenty(bits: u64) -> bool {
    let two = bits & bits >> 1;
    let four = two & two >> 2;
    let eight = four & four >> 4;
    let sixteen = eight & eight >> 8;
    sixteen & four >> 16 != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Reference implementation: the number of values if the row is JSON, all numbers are finite and the notation is
    /// plain.
    fn parsed(row: &str) -> Option<usize> {
        let numbers: Vec<f32> = serde_json::from_str(row).ok()?;
        let plain = row[1..row.len() - 1].bytes().all(|byte| byte.is_ascii_digit() || b",.-".contains(&byte));
        (plain && !numbers.is_empty() && numbers.iter().all(|number| number.is_finite()))
            .then_some(numbers.len())
    }

    /// Checks at every position within a block, and with different suffixes.
    fn check(numbers: &str, good: bool) {
        for before in 0..=BLOCK {
            let row = format!("[0.{}1,{numbers}]", "0".repeat(before));
            for behind in ["", "}", "],[1,2,3]..--,,"] {
                let got = count_plain(format!("{row}{behind}").as_bytes().strip_prefix(b"[").unwrap());
                let expected = parsed(&row).map(|numbers| PlainRow { numbers, bytes: row.len() - 1 });
                assert_eq!(got.is_some(), good, "{row}{behind}");
                assert_eq!(got, expected.filter(|_| good), "{row}{behind}");
            }
        }
    }

    #[test]
    fn plain_numbers_follow_the_json_grammar() {
        for good in ["0", "1,2,3", "-0.5", "10.25,-3", "0.0", "-0,0.00,100", "1234567890123456789.5"] {
            check(good, true);
        }
        for wrong in [
            "", ",", "1,", ",1", "1,,2", "-", "--1", "1-2", "-.5", ".5", "1.", "1.,2", "1..2", "1.2.3", "01",
            "-01", "00.5", "1.-2", "1 ", " 1", "1e5", "+1", "null", "NaN", "[1]", "\"1\"", "1/2", "1.5.",
            "0.5-",
        ] {
            check(wrong, false);
        }
    }

    #[test]
    fn only_long_digit_runs_before_the_point_are_not_plain() {
        let with = |digits: usize| format!("[{}]", "9".repeat(digits));
        let is_plain = |row: &str| count_plain(row.as_bytes().strip_prefix(b"[").unwrap()).is_some();
        assert!(is_plain(&with(19)));
        assert!(!is_plain(&with(20)));
        assert!(is_plain(&format!("[0.{}]", "9".repeat(200))));
        for before in 0..2 * BLOCK {
            assert!(!is_plain(&format!("[0.{},{}]", "1".repeat(before + 1), "9".repeat(39))), "{before}");
        }
    }

    #[test]
    fn a_truncated_row_is_not_plain() {
        let row = (0..50).map(|number| format!("-0.{number}")).collect::<Vec<_>>().join(",") + "]";
        assert!(count_plain(row.as_bytes()).is_some());
        for length in 0..row.len() {
            assert_eq!(count_plain(&row.as_bytes()[..length]), None, "{length}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Most rows of these characters are invalid, in all possible ways.
        #[test]
        fn plain_rows_are_valid_json_with_that_many_finite_numbers(
            good in prop::collection::vec(-1.0_f64..1.0, 0..20),
            wild in "[0-9]{0,3}[-0-9.,]{0,8}(,-?[0-9]{1,3}\\.[0-9]{1,3}){0,4}",
        ) {
            let good: Vec<String> = good.iter().map(|number| format!("{number:.9}")).collect();
            let row = format!("[{}]", good.into_iter().chain([wild]).collect::<Vec<_>>().join(","));
            let got = count_plain(row.as_bytes().strip_prefix(b"[").unwrap());
            prop_assert_eq!(got, parsed(&row).map(|numbers| PlainRow { numbers, bytes: row.len() - 1 }), "{}", row);
        }
    }
}
