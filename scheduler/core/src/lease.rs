//! The identifier of a spoke's lease, and who may use it.
//!
//! A lease is renewed and ended by whoever knows its identifier: 128 random bits, drawn by the hub at each registration and
//! sent to the registered spoke alone. A request names the spoke instance as well, and the hub compares the identifier with
//! the one that it has stored for that instance. So nobody finds a lease by counting, and the identifier of one instance is
//! of no use for another.

use std::fmt;
use std::hint::black_box;
use std::str::FromStr;

use regions::RegionId;

use crate::rollout::{Reader, Role};

/// The identifier of a spoke's lease. Written as 32 hexadecimal digits; `Debug` shows none of them.
#[derive(Clone, Copy)]
pub struct LeaseId(u128);

/// A text that is no identifier of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a lease is named by the 32 hexadecimal digits that its registration returned")]
pub struct LeaseIdError;

/// The spoke instance that holds a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its region.
    pub region: RegionId,
    /// Drawn anew whenever the spoke starts.
    pub boot_id: u64,
}

/// A text that names no spoke instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a holder is named as spoke/CLOUD/REGION/BOOT, such as spoke/aws/us-east-1/00000000000000ff")]
pub struct HolderError;

impl LeaseId {
    /// The identifier of these bits, which must come from a cryptographic random generator.
    pub fn from_random(bits: u128) -> LeaseId {
        LeaseId(bits)
    }

    /// Whether both are the same identifier, compared in constant time.
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

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Holder { region, boot_id } = self;
        Reader { role: Role::Spoke, place: region.clone(), boot_id: *boot_id }.fmt(f)
    }
}

impl FromStr for Holder {
    type Err = HolderError;

    fn from_str(text: &str) -> Result<Holder, HolderError> {
        match text.parse() {
            Ok(Reader { role: Role::Spoke, place: region, boot_id }) => Ok(Holder { region, boot_id }),
            Ok(Reader { role: Role::Gateway, .. }) | Err(_) => Err(HolderError),
        }
    }
}

/// The path and query at which `holder` renews its lease (`POST`).
pub fn keep_alive_path(lease: LeaseId, holder: &Holder) -> String {
    format!("/v1/leases/{lease}/keepalive?holder={holder}")
}

/// The path and query at which `holder` ends its lease (`DELETE`).
pub fn end_path(lease: LeaseId, holder: &Holder) -> String {
    format!("/v1/leases/{lease}?holder={holder}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_identifier_comes_back_as_it_went_and_matches_itself_only(one: u128, bit in 0..128u32) {
            let id = LeaseId::from_random(one);
            let read: LeaseId = id.to_string().parse().unwrap();
            prop_assert!(read.matches(id));
            prop_assert!(!LeaseId::from_random(one ^ (1 << bit)).matches(id));
        }
    }

    #[test]
    fn what_is_no_identifier_is_refused_and_none_is_printed() {
        for text in ["", "1", "+0000000000000000000000000000001", "g0000000000000000000000000000000"] {
            assert_eq!(text.parse::<LeaseId>().err(), Some(LeaseIdError), "{text}");
        }
        let id = LeaseId::from_random(0xabc);
        assert_eq!((id.to_string().len(), format!("{id:?}").as_str()), (32, "LeaseId"));
    }

    #[test]
    fn a_holder_is_a_spoke_and_no_gateway() {
        let holder = Holder { region: "aws/us-east-1".parse().unwrap(), boot_id: 255 };
        assert_eq!(holder.to_string(), "spoke/aws/us-east-1/00000000000000ff");
        assert_eq!(holder.to_string().parse(), Ok(holder.clone()));
        for text in ["gateway/aws/us-east-1/00000000000000ff", "spoke/aws/us-east-1", ""] {
            assert_eq!(text.parse::<Holder>(), Err(HolderError), "{text}");
        }
        let path = keep_alive_path(LeaseId::from_random(1), &holder);
        assert_eq!(
            path,
            "/v1/leases/00000000000000000000000000000001/keepalive?holder=spoke/aws/us-east-1/00000000000000ff"
        );
    }
}
