//! Eight bytes looked at at once.
//!
//! A body is searched for a few bytes that matter among many that do not. Where those are rare `memchr` finds them, at some
//! twenty bytes a nanosecond; where every other byte is one (token ids, texts of `\u` escapes) its calls cost more than they
//! save, and a look at each byte reads 0.8 GB/s. Between the two is a word: a `u64` of eight bytes, and arithmetic that
//! answers for all eight. Portable, so that it needs no `unsafe` and no second version for another processor.
//!
//! An answer is a mask with one bit for each byte, the first byte lowest: [`Lanes`] has it as the top bit of each byte,
//! [`Lanes::bits`] packs it into eight bits.

/// As many bytes as are looked at at once.
pub(super) const WORD_BYTES: usize = 8;

const ONES: u64 = 0x0101_0101_0101_0101;
const TOPS: u64 = 0x8080_8080_8080_8080;

/// Eight bytes, the first one lowest.
#[derive(Clone, Copy)]
pub(super) struct Word(u64);

/// One bit for each byte of a word: the top one of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Lanes(u64);

impl Word {
    pub(super) fn of(bytes: &[u8; WORD_BYTES]) -> Word {
        Word(u64::from_le_bytes(*bytes))
    }

    /// The bytes that are `byte`.
    #[inline]
    pub(super) fn equal(self, byte: u8) -> Lanes {
        let differs = self.0 ^ (ONES * u64::from(byte));
        // The sum has the top bit of every byte whose lower bits differ, and no carry leaves a byte.
        Lanes(!(((differs & !TOPS) + !TOPS) | differs) & TOPS)
    }

    /// The bytes that are digits.
    #[inline]
    pub(super) fn digits(self) -> Lanes {
        let (low, top) = (self.0 & !TOPS, self.0 & TOPS);
        let at_least = |byte: u8| low + ONES * u64::from(0x80 - byte);
        Lanes(at_least(b'0') & !at_least(b'9' + 1) & !top & TOPS)
    }
}

impl Lanes {
    pub(super) const NONE: Lanes = Lanes(0);

    #[inline]
    pub(super) fn or(self, other: Lanes) -> Lanes {
        Lanes(self.0 | other.0)
    }

    /// Where the first one is, if none of the `others` stands before it.
    #[inline]
    pub(super) fn first_before(self, others: Lanes) -> Option<usize> {
        let up_to_it = self.0 ^ self.0.wrapping_sub(1);
        (self.0 != 0 && others.0 & up_to_it == 0).then(|| self.0.trailing_zeros() as usize / 8)
    }

    /// How many of the bytes from the first are in it without one that is not.
    #[inline]
    pub(super) fn leading(self) -> usize {
        (!self.0 & TOPS).trailing_zeros() as usize / 8
    }

    /// Where it begins anew: bytes that are in it and whose predecessor is not; that of the first is the last of `before`.
    #[inline]
    pub(super) fn begun(self, before: Lanes) -> Lanes {
        Lanes(self.0 & !(self.0 << 8 | before.0 >> 56))
    }

    /// Those of the first `bytes` bytes, of at most seven.
    #[inline]
    pub(super) fn within(self, bytes: usize) -> Lanes {
        Lanes(self.0 & ((1 << (8 * bytes)) - 1))
    }

    /// Whether the last byte is in it.
    #[inline]
    pub(super) fn ends(self) -> bool {
        self.0 >> 63 == 1
    }

    /// How many there are.
    #[inline]
    pub(super) fn count(self) -> u64 {
        (self.0 >> 7).wrapping_mul(ONES) >> 56
    }

    /// Packed: bit `i` for byte `i`.
    #[inline]
    pub(super) fn bits(self) -> u8 {
        // Each factor moves one byte's bit to its place in the top byte, and no two meet.
        ((self.0 >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8
    }
}

/// Which of eight bytes stand behind a backslash that is not itself behind one: in bits 0 to 7, and in bit 8 whether the
/// byte that follows them does. Looked up by the backslashes, with bit 8 for whether the first byte does.
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

/// The bytes that are escaped, given the `backslashes` and whether the first byte is escaped by what stands before it; and
/// whether the byte behind them is.
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

    /// Bytes at the edges of what is looked for, and any.
    fn bytes() -> impl Strategy<Value = [u8; WORD_BYTES]> {
        prop::array::uniform8(prop_oneof![
            any::<u8>(),
            prop::sample::select(b"\"\\,0/9:\0\x01\x7f\x80\xff".as_slice())
        ])
    }

    proptest! {
        #[test]
        fn a_word_says_of_each_byte_what_is_so(bytes in bytes(), byte: u8) {
            let word = Word::of(&bytes);
            prop_assert_eq!(word.equal(byte).bits(), bits(&bytes, |one| one == byte));
            for byte in *b"\"\\, " {
                prop_assert_eq!(word.equal(byte).bits(), bits(&bytes, |one| one == byte));
            }
            prop_assert_eq!(word.digits().bits(), bits(&bytes, |byte| byte.is_ascii_digit()));
        }

        #[test]
        fn a_mask_counts_as_one_byte_after_the_other_does(bytes in bytes(), before in bytes(), within in 0..8usize) {
            let (digits, last) = (Word::of(&bytes).digits(), Word::of(&before).digits());
            let is_digit = |at: usize| bytes[at].is_ascii_digit();
            let begins = |at: usize| {
                is_digit(at) && !(if at == 0 { before[WORD_BYTES - 1].is_ascii_digit() } else { is_digit(at - 1) })
            };
            let counted = |end: usize| (0..end).filter(|at| begins(*at)).count() as u64;
            prop_assert_eq!(digits.begun(last).count(), counted(WORD_BYTES));
            prop_assert_eq!(digits.begun(last).within(within).count(), counted(within));
            prop_assert_eq!(digits.leading(), (0..8).find(|at| !is_digit(*at)).unwrap_or(8));
            prop_assert_eq!(digits.ends(), is_digit(WORD_BYTES - 1));
        }

        #[test]
        fn the_first_counts_only_if_nothing_stands_before_it(bytes in bytes()) {
            let word = Word::of(&bytes);
            let first = bytes.iter().position(|byte| matches!(byte, b'"' | b'\\'));
            let expected = first.filter(|at| bytes[*at] == b'"');
            prop_assert_eq!(word.equal(b'"').first_before(word.equal(b'\\')), expected);
        }
    }

    #[test]
    fn what_is_escaped_is_known_of_every_word() {
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
