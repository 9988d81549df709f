//! Share of one gateway in a tenant's rate limit.

/// Share of a rate limit in millionths. Integers, so that the shares of all gateways add up exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LimitShare(u32);

impl LimitShare {
    /// Share of a gateway that is alone.
    pub const WHOLE: LimitShare = LimitShare(1_000_000);

    /// Creates a share of `millionths`, from 1 to a million. A share of zero would reject the first request of a
    /// tenant at a gateway, whose demand would never be reported.
    pub fn new(millionths: u32) -> Option<LimitShare> {
        (1..=LimitShare::WHOLE.0).contains(&millionths).then_some(LimitShare(millionths))
    }

    /// Returns the share of each of `gateways` gateways.
    pub fn equal(gateways: u32) -> LimitShare {
        LimitShare((LimitShare::WHOLE.0 / gateways.max(1)).max(1))
    }

    /// Returns the share in millionths.
    pub const fn millionths(self) -> u32 {
        self.0
    }
}

/// Value for each rate limit of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct PerLimit<T> {
    /// Value for the requests.
    pub requests: T,
    /// Value for the inputs.
    pub inputs: T,
    /// Value for the tokens.
    pub tokens: T,
}

impl<T> PerLimit<T> {
    /// Creates a value for each limit.
    pub fn each(mut value: impl FnMut() -> T) -> PerLimit<T> {
        PerLimit { requests: value(), inputs: value(), tokens: value() }
    }

    /// Converts each value.
    pub fn map<U>(self, mut convert: impl FnMut(T) -> U) -> PerLimit<U> {
        let PerLimit { requests, inputs, tokens } = self;
        PerLimit { requests: convert(requests), inputs: convert(inputs), tokens: convert(tokens) }
    }

    /// Combines the values of two.
    pub fn zip<U>(self, other: PerLimit<U>) -> PerLimit<(T, U)> {
        PerLimit {
            requests: (self.requests, other.requests),
            inputs: (self.inputs, other.inputs),
            tokens: (self.tokens, other.tokens),
        }
    }

    /// Returns the values in order.
    pub fn into_values(self) -> [T; 3] {
        [self.requests, self.inputs, self.tokens]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_never_zero_and_never_more_than_the_limit() {
        assert_eq!((LimitShare::new(0), LimitShare::new(1_000_001)), (None, None));
        assert_eq!(LimitShare::new(1_000_000), Some(LimitShare::WHOLE));
        let equal = [0, 1, 3, 2_000_000].map(|gateways| LimitShare::equal(gateways).millionths());
        assert_eq!(equal, [1_000_000, 1_000_000, 333_333, 1]);
    }
}
