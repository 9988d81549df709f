//! Readers of route tables: gateways, which select regions by them, and spokes, which accept or reject requests by
//! them.

use std::fmt;
use std::str::FromStr;

use regions::RegionId;

/// Role of a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Sends requests.
    Gateway,
    /// Accepts requests.
    Spoke,
}

impl Role {
    const ALL: [Role; 2] = [Role::Gateway, Role::Spoke];

    fn as_str(self) -> &'static str {
        match self {
            Role::Gateway => "gateway",
            Role::Spoke => "spoke",
        }
    }
}

/// Process that runs a route table. Written as `gateway/aws/us-east-1/00000000000000ff`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reader {
    /// Gateway or spoke.
    pub role: Role,
    /// Region of the process.
    pub region: RegionId,
    /// Random number drawn at each start. Two processes in one region acknowledge separately, and a process that
    /// restarts from its snapshot is a new reader.
    pub boot_id: u64,
}

/// Error for a text that does not name a gateway or spoke that follows the route table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a reader; write ROLE/CLOUD/REGION/BOOT, such as gateway/aws/us-east-1/00000000000000ff"
)]
pub struct ReaderError(String);

impl fmt::Display for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reader { role, region, boot_id } = self;
        write!(f, "{}/{region}/{boot_id:016x}", role.as_str())
    }
}

impl FromStr for Reader {
    type Err = ReaderError;

    fn from_str(text: &str) -> Result<Reader, ReaderError> {
        let read = || {
            let (role, rest) = text.split_once('/')?;
            let role = Role::ALL.into_iter().find(|known| known.as_str() == role)?;
            let (region, boot) = rest.rsplit_once('/')?;
            let hexadecimal = boot.len() == 16 && boot.bytes().all(|byte| byte.is_ascii_hexdigit());
            let boot_id = u64::from_str_radix(boot, 16).ok().filter(|_| hexadecimal)?;
            Some(Reader { role, region: region.parse().ok()?, boot_id })
        };
        read().ok_or_else(|| ReaderError(text.chars().take(96).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_is_read_back_as_it_was_written() {
        for role in Role::ALL {
            let reader = Reader { role, region: "aws/us-east-1".parse().unwrap(), boot_id: 255 };
            assert_eq!(reader.to_string().parse(), Ok(reader));
        }
        for text in [
            "",
            "gateway",
            "gateway/aws/us-east-1",
            "gateway/aws/us-east-1/ff",
            "gateway/aws/us-east-1/+0000000000000ff",
            "hub/aws/us-east-1/00000000000000ff",
            "spoke/us-east-1/00000000000000ff",
        ] {
            assert_eq!(text.parse::<Reader>(), Err(ReaderError(text.to_owned())));
        }
    }
}
