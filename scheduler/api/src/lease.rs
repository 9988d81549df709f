//! Identifier of a spoke's lease, and the authorization to use it.
//!
//! Knowledge of the identifier authorizes to renew and end a lease. It consists of 128 random bits, drawn by the hub at
//! each registration and sent only to the registered spoke. A request also names the spoke instance, and the hub
//! compares the identifier with the stored one of that instance. Identifiers can therefore not be found by counting,
//! and the identifier of one instance does not work for another.

use std::fmt;
use std::hint::black_box;
use std::str::FromStr;

use regions::RegionId;

use crate::reader::{Reader, Role};

/// Identifier of a spoke's lease. Written as 32 hexadecimal digits; hidden in `Debug` output.
#[derive(Clone, Copy)]
pub struct LeaseId(u128);

/// Error for a text that is not the identifier of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid lease identifier; send the 32 hexadecimal digits that the registration returned")]
pub struct LeaseIdError;

/// Spoke instance that holds a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseHolder {
    /// Region of the spoke.
    pub region: RegionId,
    /// Random number drawn at each start of the spoke.
    pub boot_id: u64,
}

/// Error for a text that does not name the instance of a spoke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid lease holder; write spoke/CLOUD/REGION/BOOT, such as spoke/aws/us-east-1/00000000000000ff")]
pub struct LeaseHolderError;

impl LeaseId {
    /// Creates an identifier from these bits, which must come from a cryptographic random generator.
    pub fn from_random(bits: u128) -> LeaseId {
        LeaseId(bits)
    }

    /// Compares two identifiers in constant time.
    pub fn matches(self, other: LeaseId) -> bool {
        black_box(self.0 ^ other.0) == 0
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LeaseId")
    }
}

impl FromStr for LeaseId {
    type Err = LeaseIdError;

    fn from_str(text: &str) -> Result<LeaseId, LeaseIdError> {
        let is_id = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        u128::from_str_radix(text, 16).ok().filter(|_| is_id).map(LeaseId).ok_or(LeaseIdError)
    }
}

impl fmt::Display for LeaseHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LeaseHolder { region, boot_id } = self;
        Reader { role: Role::Spoke, region: region.clone(), boot_id: *boot_id }.fmt(f)
    }
}

impl FromStr for LeaseHolder {
    type Err = LeaseHolderError;

    fn from_str(text: &str) -> Result<LeaseHolder, LeaseHolderError> {
        match text.parse() {
            Ok(Reader { role: Role::Spoke, region, boot_id }) => Ok(LeaseHolder { region, boot_id }),
            Ok(Reader { role: Role::Gateway, .. }) | Err(_) => Err(LeaseHolderError),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_identifier_survives_a_round_trip_and_matches_only_itself(one: u128, bit in 0..128u32) {
            let id = LeaseId::from_random(one);
            let read: LeaseId = id.to_string().parse().unwrap();
            prop_assert!(read.matches(id));
            prop_assert!(!LeaseId::from_random(one ^ (1 << bit)).matches(id));
        }
    }

    #[test]
    fn an_invalid_identifier_is_rejected_and_none_is_printed() {
        for text in ["", "1", "+0000000000000000000000000000001", "g0000000000000000000000000000000"] {
            assert_eq!(text.parse::<LeaseId>().err(), Some(LeaseIdError), "{text}");
        }
        let id = LeaseId::from_random(0xabc);
        assert_eq!((id.to_string().len(), format!("{id:?}").as_str()), (32, "LeaseId"));
    }

    #[test]
    fn a_holder_is_a_spoke_and_no_gateway() {
        let holder = LeaseHolder { region: "aws/us-east-1".parse().unwrap(), boot_id: 255 };
        assert_eq!(holder.to_string(), "spoke/aws/us-east-1/00000000000000ff");
        assert_eq!(holder.to_string().parse(), Ok(holder.clone()));
        for text in ["gateway/aws/us-east-1/00000000000000ff", "spoke/aws/us-east-1", ""] {
            assert_eq!(text.parse::<LeaseHolder>(), Err(LeaseHolderError), "{text}");
        }
    }
}
