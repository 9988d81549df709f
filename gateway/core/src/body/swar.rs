//! Eight bytes processed at once (SIMD within a register).
//!
//! A body is searched for a few significant bytes among many others. Where those are rare `memchr` finds them, at some
//! twenty bytes a nanosecond; where every other byte is one (token ids, texts of `\u` escapes) its calls cost more than
//! they save, and a loop over single bytes reads 0.8 GB/s. In between, a word is best: a `u64` of eight bytes, and
//! arithmetic on all eight. It is portable, needs no `unsafe` and no version for each processor.
//!
//! A result is a mask with one bit for each byte, the first byte lowest: [`ByteMask`] has it as the top bit of each
//! byte, [`ByteMask::bits`] packs it into eight bits.

/// Number of bytes processed at once.
pub(super) const WORD_BYTES: usize = 8;

const ONES: u64 = 0x0101_0101_0101_0101;
const TOPS: u64 = 0x8080_8080_8080_8080;

/// Eight bytes, the first one lowest.
#[derive(Clone, Copy)]
pub(super) struct SwarWord(u64);

/// Mask with one bit for each byte of a word: its top bit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ByteMask(u64);

impl SwarWord {
    pub(super) fn of(bytes: &[u8; WORD_BYTES]) -> SwarWord {
        SwarWord(u64::from_le_bytes(*bytes))
    }

    /// Returns the bytes equal to `byte`.
    #[inline]
    pub(super) fn equal(self, byte: u8) -> ByteMask {
        let differs = self.0 ^ (ONES * u64::from(byte));
        // The sum has the top bit of every byte whose lower bits differ, and no carry leaves a byte.
        ByteMask(!(((differs & !TOPS) + !TOPS) | differs) & TOPS)
    }

    /// Returns the bytes that are digits.
    #[inline]
    pub(super) fn digits(self) -> ByteMask {
        let (low, top) = (self.0 & !TOPS, self.0 & TOPS);
        let at_least = |byte: u8| low + ONES * u64::from(0x80 - byte);
        ByteMask(at_least(b'0') & !at_least(b'9' + 1) & !top & TOPS)
    }
}

impl ByteMask {
    pub(super) const NONE: ByteMask = ByteMask(0);

    #[inline]
    pub(super) fn or(self, other: ByteMask) -> ByteMask {
        ByteMask(self.0 | other.0)
    }

    /// Returns the index of the first byte, if none of the `others` precedes it.
    #[inline]
    pub(super) fn first_before(self, others: ByteMask) -> Option<usize> {
        let up_to_it = self.0 ^ self.0.wrapping_sub(1);
        (self.0 != 0 && others.0 & up_to_it == 0).then(|| self.0.trailing_zeros() as usize / 8)
    }

    /// Returns the number of consecutive bytes in the mask, from the first one on.
    #[inline]
    pub(super) fn leading(self) -> usize {
        (!self.0 & TOPS).trailing_zeros() as usize / 8
    }

    /// Returns the starts of runs: bytes in the mask whose predecessor is not; the predecessor of the first is the last
    /// of `before`.
    #[inline]
    pub(super) fn run_starts(self, before: ByteMask) -> ByteMask {
        ByteMask(self.0 & !(self.0 << 8 | before.0 >> 56))
    }

    /// Returns the mask limited to the first `bytes` bytes, of at most seven.
    #[inline]
    pub(super) fn within(self, bytes: usize) -> ByteMask {
        ByteMask(self.0 & ((1 << (8 * bytes)) - 1))
    }

    /// Returns whether the last byte is in the mask.
    #[inline]
    pub(super) fn ends(self) -> bool {
        self.0 >> 63 == 1
    }

    /// Returns the number of bytes in the mask.
    #[inline]
    pub(super) fn count(self) -> u64 {
        (self.0 >> 7).wrapping_mul(ONES) >> 56
    }

    /// Returns the packed mask: bit `i` for byte `i`.
    #[inline]
    pub(super) fn bits(self) -> u8 {
        // Each factor moves one byte's bit to its position in the top byte, and no two collide.
        ((self.0 >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8
    }
}

/// Escaped bytes of a word, those after a backslash that is not itself escaped: in bits 0 to 7, and in bit 8 whether
/// the next byte is escaped. Indexed by the backslashes, with bit 8 for whether the first byte is escaped.
const ESCAPED: [u16; 512] = {
    let mut table = [0; 512];
    let mut given = 0;
    while given < 512 {
        let (mut escaped, mut bit, mut this_one) = (0u16, 0, given >> 8 == 1);
        while bit < 8 {
            if this_one {
                escaped |= 1 << bit;
            }
            this_one = !this_one && given >> bit & 1 == 1;
            bit += 1;
        }
        table[given] = escaped | (this_one as u16) << 8;
        given += 1;
    }
    table
};

/// Returns the escaped bytes, given the `backslashes` and whether the first byte is escaped by the previous word; and
/// whether the next byte is escaped.
#[inline]
pub(super) fn escaped(backslashes: u8, first: bool) -> (u8, bool) {
    let known = ESCAPED[usize::from(backslashes) | usize::from(first) << 8];
    (known as u8, known >> 8 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bits(bytes: &[u8; WORD_BYTES], is: impl Fn(u8) -> bool) -> u8 {
        bytes.iter().enumerate().map(|(at, byte)| u8::from(is(*byte)) << at).sum()
    }

    /// Bytes around the searched ones, and any others.
    fn bytes() -> impl Strategy<Value = [u8; WORD_BYTES]> {
        prop::array::uniform8(prop_oneof![
            any::<u8>(),
            prop::sample::select(b"\"\\,0/9:\0\x01\x7f\x80\xff".as_slice())
        ])
    }

    proptest! {
        #[test]
        fn a_word_classifies_each_byte(bytes in bytes(), byte: u8) {
            let word = SwarWord::of(&bytes);
            prop_assert_eq!(word.equal(byte).bits(), bits(&bytes, |one| one == byte));
            for byte in *b"\"\\, " {
                prop_assert_eq!(word.equal(byte).bits(), bits(&bytes, |one| one == byte));
            }
            prop_assert_eq!(word.digits().bits(), bits(&bytes, |byte| byte.is_ascii_digit()));
        }

        #[test]
        fn a_mask_counts_like_a_loop_over_bytes(bytes in bytes(), before in bytes(), within in 0..8usize) {
            let (digits, last) = (SwarWord::of(&bytes).digits(), SwarWord::of(&before).digits());
            let is_digit = |at: usize| bytes[at].is_ascii_digit();
            let begins = |at: usize| {
                is_digit(at) && !(if at == 0 { before[WORD_BYTES - 1].is_ascii_digit() } else { is_digit(at - 1) })
            };
            let counted = |end: usize| (0..end).filter(|at| begins(*at)).count() as u64;
            prop_assert_eq!(digits.run_starts(last).count(), counted(WORD_BYTES));
            prop_assert_eq!(digits.run_starts(last).within(within).count(), counted(within));
            prop_assert_eq!(digits.leading(), (0..8).find(|at| !is_digit(*at)).unwrap_or(8));
            prop_assert_eq!(digits.ends(), is_digit(WORD_BYTES - 1));
        }

        #[test]
        fn the_first_byte_is_found_only_if_no_other_precedes_it(bytes in bytes()) {
            let word = SwarWord::of(&bytes);
            let first = bytes.iter().position(|byte| matches!(byte, b'"' | b'\\'));
            let expected = first.filter(|at| bytes[*at] == b'"');
            prop_assert_eq!(word.equal(b'"').first_before(word.equal(b'\\')), expected);
        }
    }

    #[test]
    fn the_escape_table_is_correct() {
        for first in [false, true] {
            for backslashes in 0..=255u8 {
                let (mut expected, mut next) = (0, first);
                for at in 0..8 {
                    if next {
                        expected |= 1 << at;
                        next = false;
                    } else {
                        next = backslashes >> at & 1 == 1;
                    }
                }
                assert_eq!(escaped(backslashes, first), (expected, next), "{backslashes:08b} {first}");
            }
        }
    }
}
