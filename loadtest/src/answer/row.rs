//! A row of numbers, counted without a number being read.
//!
//! Nearly all of an answer are digits. A row that is written plainly (no exponent, no space) is therefore looked at 64 bytes
//! at a time: where digits, points, signs and commas stand are words of 64 bits, and what JSON says of a number is said of
//! neighbours, so of a word and the same word shifted by one. That a number has one point at most is said by addition: a one
//! added at the first digit after a point runs through the digits, and comes out where they end. Whatever is written
//! otherwise is `None` here and read number by number elsewhere, so nothing has to be decided but "good, and so many".
//!
//! A number with a point is finite whatever its digits, unless it has 39 of them before the point. As many in a row cover
//! twenty of one block wherever they begin, and rows with twenty are not plain.

use super::masks::{BLOCK, Masks};

/// A plain row: from its first byte after the bracket to where it ends, its own bracket included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plain {
    pub(super) numbers: usize,
    pub(super) bytes: usize,
}

/// What the last byte of a block means for the first of the next, in the lowest bit.
#[derive(Clone, Copy)]
struct Carry {
    /// A number begins.
    begins: u64,
    minus: u64,
    point: u64,
    digit: u64,
    /// A zero, after which no digit may stand before the point.
    lone_zero: u64,
    /// Digits after a point go on.
    fraction: u64,
}

/// Looks at the row whose text begins at the front of `text`, after its bracket.
pub(super) fn plain(text: &[u8]) -> Option<Plain> {
    let mut carry = Carry { begins: 1, minus: 0, point: 0, digit: 0, lone_zero: 0, fraction: 0 };
    let (blocks, rest) = text.as_chunks::<BLOCK>();
    let mut numbers = 0;
    for (place, block) in blocks.iter().enumerate() {
        let (commas, ends) = step(Masks::of(block), &mut carry)?;
        numbers += commas;
        if let Some(ends) = ends {
            return Some(Plain { numbers: numbers + 1, bytes: place * BLOCK + ends });
        }
    }
    let mut last = [0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    // The zeros behind the text are no part of a number: it ends before them, or is not plain.
    let (commas, ends) = step(Masks::of(&last), &mut carry)?;
    Some(Plain { numbers: numbers + commas + 1, bytes: blocks.len() * BLOCK + ends? })
}

/// Goes over a block: how many commas it has, and where the row ends if it does here. None if it is not plain.
fn step(masks: Masks, carry: &mut Carry) -> Option<(usize, Option<usize>)> {
    // Up to the first bracket and with it.
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
    // Numbers begin with a digit or a sign, and a sign stands nowhere else.
    let wrong_begin = (begins & !(digit | minus)) | (minus & !begins) | (after_minus & !digit);
    // A point has a digit on either side, and whatever ends a number follows one.
    let wrong_point = (after_point & !digit) | ((point | comma | close) & !after_digit);
    let (out, overflow) = digit.overflowing_add(after_point | carry.fraction);
    let second_point = out & !digit & point;
    // Bits beyond the bracket say nothing.
    if (wrong_begin | wrong_point | second_point | (after_lone_zero & digit)) & within != 0 {
        return None;
    }
    let whole = digit & out;
    if has_twenty(whole) {
        return None;
    }
    *carry = Carry {
        begins: comma >> 63,
        minus: minus >> 63,
        point: point >> 63,
        digit: digit >> 63,
        lone_zero: lone_zero >> 63,
        fraction: u64::from(overflow),
    };
    Some((comma.count_ones() as usize, (close != 0).then(|| close.trailing_zeros() as usize + 1)))
}

/// Whether twenty bits in a row are set.
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

    /// Whether a row is JSON, of numbers that are finite and written plainly; how many.
    fn parsed(row: &str) -> Option<usize> {
        let numbers: Vec<f32> = serde_json::from_str(row).ok()?;
        let plain = row[1..row.len() - 1].bytes().all(|byte| byte.is_ascii_digit() || b",.-".contains(&byte));
        (plain && !numbers.is_empty() && numbers.iter().all(|number| number.is_finite()))
            .then_some(numbers.len())
    }

    /// At every place within a block, and with something behind it.
    fn check(numbers: &str, good: bool) {
        for before in 0..=BLOCK {
            let row = format!("[0.{}1,{numbers}]", "0".repeat(before));
            for behind in ["", "}", "],[1,2,3]..--,,"] {
                let got = plain(format!("{row}{behind}").as_bytes().strip_prefix(b"[").unwrap());
                let expected = parsed(&row).map(|numbers| Plain { numbers, bytes: row.len() - 1 });
                assert_eq!(got.is_some(), good, "{row}{behind}");
                assert_eq!(got, expected.filter(|_| good), "{row}{behind}");
            }
        }
    }

    #[test]
    fn plain_numbers_are_what_json_says_they_are() {
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
    fn as_many_digits_as_a_row_can_have_and_stay_plain_say_nothing_of_its_fraction() {
        let with = |digits: usize| format!("[{}]", "9".repeat(digits));
        let plainly = |row: &str| plain(row.as_bytes().strip_prefix(b"[").unwrap()).is_some();
        assert!(plainly(&with(19)));
        assert!(!plainly(&with(20)));
        assert!(plainly(&format!("[0.{}]", "9".repeat(200))));
        for before in 0..2 * BLOCK {
            assert!(!plainly(&format!("[0.{},{}]", "1".repeat(before + 1), "9".repeat(39))), "{before}");
        }
    }

    #[test]
    fn a_row_that_is_cut_off_is_not_plain() {
        let row = (0..50).map(|number| format!("-0.{number}")).collect::<Vec<_>>().join(",") + "]";
        assert!(plain(row.as_bytes()).is_some());
        for length in 0..row.len() {
            assert_eq!(plain(&row.as_bytes()[..length]), None, "{length}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Rows of these characters are nearly all wrong, and wrong in every way.
        #[test]
        fn whatever_is_taken_for_plain_is_json_of_so_many_finite_numbers(
            good in prop::collection::vec(-1.0_f64..1.0, 0..20),
            wild in "[0-9]{0,3}[-0-9.,]{0,8}(,-?[0-9]{1,3}\\.[0-9]{1,3}){0,4}",
        ) {
            let good: Vec<String> = good.iter().map(|number| format!("{number:.9}")).collect();
            let row = format!("[{}]", good.into_iter().chain([wild]).collect::<Vec<_>>().join(","));
            let got = plain(row.as_bytes().strip_prefix(b"[").unwrap());
            prop_assert_eq!(got, parsed(&row).map(|numbers| Plain { numbers, bytes: row.len() - 1 }), "{}", row);
        }
    }
}
