//! Accelerators that a region offers: types, numbers and prices.
//!
//! The catalogue has what providers publish, and the spokes of a region may register what they have. A blank number or
//! price is unknown, never zero: an unknown number limits nothing, and a region whose price is unknown is chosen after
//! those whose price is known.
//!
//! Money is counted in millionths of the unit in which the operator writes prices, so that sums are exact.

use std::collections::BTreeMap;

use crate::id::AcceleratorType;

/// Maximum price or cost per hour in a file. A larger value is probably in another unit.
pub const PRICE_MAX: f64 = 1e6;
/// Maximum number of accelerators of one type in a region. A larger value is probably a mistake.
pub const COUNT_MAX: u32 = 1_000_000;
/// Maximum number of accelerator types of one region: providers rent some twenty.
pub const TYPES_MAX: usize = 64;

/// Accelerators of a region by type.
pub type Accelerators = BTreeMap<AcceleratorType, Offering>;

/// Accelerators of one type in a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offering {
    /// Number that the fleet may use; `None` if unknown.
    pub count: Option<u32>,
    /// Price of one per hour, in millionths of the operator's currency unit; `None` if unknown.
    pub price: Option<u64>,
}

/// Converts an amount of money in a file to millionths. The readers reject amounts above [`PRICE_MAX`].
pub fn to_millionths(amount: f64) -> u64 {
    (amount * 1e6).round() as u64
}

/// Formats an amount in millionths as it is written in a file, without trailing zeros.
pub fn millionths_to_text(millionths: u64) -> String {
    let (whole, fraction) = (millionths / 1_000_000, millionths % 1_000_000);
    let text = format!("{whole}.{fraction:06}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_written_as_they_were_read() {
        for (amount, text) in
            [(0.0, "0"), (0.71, "0.71"), (12.0, "12"), (1e6, "1000000"), (0.000_001, "0.000001")]
        {
            assert_eq!(millionths_to_text(to_millionths(amount)), text);
        }
    }
}
