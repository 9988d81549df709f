//! Who runs route tables: gateways, which decide by them where a request may go, and spokes, which decide by them what
//! they take.

use std::fmt;
use std::str::FromStr;

use regions::RegionId;

/// What a reader does with a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Sends requests.
    Gateway,
    /// Takes them.
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

/// One process that runs a table. Written `gateway/aws/us-east-1/00000000000000ff`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reader {
    /// What it does with it.
    pub role: Role,
    /// Where it stands.
    pub place: RegionId,
    /// Drawn anew whenever it starts: of two at one place each acknowledges for itself, and one that starts again from
    /// its disk is not taken for what it was before.
    pub boot_id: u64,
}

/// A text that names no reader.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` names no reader: write ROLE/CLOUD/REGION/BOOT, such as gateway/aws/us-east-1/00000000000000ff"
)]
pub struct ReaderError(String);

impl fmt::Display for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reader { role, place, boot_id } = self;
        write!(f, "{}/{place}/{boot_id:016x}", role.as_str())
    }
}

impl FromStr for Reader {
    type Err = ReaderError;

    fn from_str(text: &str) -> Result<Reader, ReaderError> {
        let read = || {
            let (role, rest) = text.split_once('/')?;
            let role = Role::ALL.into_iter().find(|known| known.as_str() == role)?;
            let (place, boot) = rest.rsplit_once('/')?;
            let hexadecimal = boot.len() == 16 && boot.bytes().all(|byte| byte.is_ascii_hexdigit());
            let boot_id = u64::from_str_radix(boot, 16).ok().filter(|_| hexadecimal)?;
            Some(Reader { role, place: place.parse().ok()?, boot_id })
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
            let reader = Reader { role, place: "aws/us-east-1".parse().unwrap(), boot_id: 255 };
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
