//! Header of the PROXY protocol, version 2: the client of a connection that a load balancer forwards.
//!
//! The specification is `proxy-protocol.txt` of HAProxy. A header is accepted only from load balancers that the
//! configuration names; it is parsed strictly all the same, since a connection whose beginning two programs interpret
//! differently is how a client chooses its own address. Version 1, which is text, is rejected by name: it would be
//! searched for its end byte by byte, and every load balancer sends version 2. The checksum and other additional fields are not
//! used.
//!
//! Written here: the package `ppp` depends on an old `thiserror` and accepts fields that exceed the header.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// First bytes of every header. No request and no TLS handshake begins with them.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Bytes of the part of a header that has a fixed length.
pub const PREFIX_BYTES: usize = 16;
/// Maximum bytes of a header, with its additional fields; clouds send fewer than a hundred. A longer one is rejected
/// before it is read.
pub const HEADER_BYTES_MAX: usize = 1024;

/// Origin of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxiedPeer {
    /// A client, at this address.
    Client(SocketAddr),
    /// The load balancer itself, such as for its health check, or a client without an IP address.
    LoadBalancer,
}

/// Reason why the beginning of a connection is not a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProxyHeaderError {
    /// A connection from a network in `proxy_protocol_from` has no PROXY protocol header, and was rejected.
    #[error(
        "the connection does not begin with a PROXY protocol header; enable version 2 at the load balancer"
    )]
    Missing,
    /// The load balancer sends the text version of the PROXY protocol, and the connection was rejected.
    #[error("the load balancer sends version 1 of the PROXY protocol; switch it to version 2")]
    Version1,
    /// A field of the load balancer's header has an undefined value, and the connection was rejected.
    #[error("the PROXY protocol header is malformed: {0}")]
    Malformed(&'static str),
    /// The header of the load balancer is longer than the limit, and the connection was rejected.
    #[error("the PROXY protocol header has {0} bytes; the limit is {HEADER_BYTES_MAX}")]
    TooLong(usize),
}

/// Checks the first bytes that have arrived, up to [`PREFIX_BYTES`], so that a peer that sends something else is not waited
/// for.
///
/// # Errors
///
/// When no header of version 2 begins like this.
pub fn check_beginning(bytes: &[u8]) -> Result<(), ProxyHeaderError> {
    let compared = bytes.len().min(SIGNATURE.len());
    if bytes[..compared] == SIGNATURE[..compared] {
        return Ok(());
    }
    let is_version_1 = bytes.len() >= 6 && bytes.starts_with(b"PROXY ");
    let may_be_version_1 = bytes.len() < 6 && b"PROXY ".starts_with(bytes);
    match (is_version_1, may_be_version_1) {
        (true, _) => Err(ProxyHeaderError::Version1),
        (false, true) => Ok(()),
        (false, false) => Err(ProxyHeaderError::Missing),
    }
}

/// Returns the number of bytes that follow the prefix.
///
/// # Errors
///
/// When the prefix is not that of a header, or the header is too long.
pub fn remaining_bytes(prefix: &[u8; PREFIX_BYTES]) -> Result<usize, ProxyHeaderError> {
    check_beginning(prefix)?;
    if prefix[12] >> 4 != 2 {
        return Err(ProxyHeaderError::Malformed("the version is not 2"));
    }
    let remaining = usize::from(u16::from_be_bytes([prefix[14], prefix[15]]));
    match PREFIX_BYTES + remaining {
        all if all > HEADER_BYTES_MAX => Err(ProxyHeaderError::TooLong(all)),
        _ => Ok(remaining),
    }
}

/// Parses a complete header: the prefix, and the bytes that follow it.
///
/// # Errors
///
/// When a field is undefined or exceeds the header.
pub fn parse(prefix: &[u8; PREFIX_BYTES], rest: &[u8]) -> Result<ProxiedPeer, ProxyHeaderError> {
    if remaining_bytes(prefix)? != rest.len() {
        return Err(ProxyHeaderError::Malformed("its length is another one"));
    }
    let is_local = match prefix[12] & 0xf {
        0 => true,
        1 => false,
        _ => return Err(ProxyHeaderError::Malformed("the command is unknown")),
    };
    let (family, protocol) = (prefix[13] >> 4, prefix[13] & 0xf);
    if protocol > 2 || (protocol == 2 && !is_local) {
        return Err(ProxyHeaderError::Malformed("the protocol is not TCP"));
    }
    let address_bytes = match family {
        // The specification leaves the content to the sender.
        0 => return Ok(ProxiedPeer::LoadBalancer),
        1 => 12,
        2 => 36,
        3 => 216,
        _ => return Err(ProxyHeaderError::Malformed("the address family is unknown")),
    };
    let Some((addresses, fields)) = rest.split_at_checked(address_bytes) else {
        return Err(ProxyHeaderError::Malformed("the addresses exceed the header"));
    };
    check_fields(fields)?;
    // The addresses of a LOCAL header are to be ignored.
    if is_local {
        return Ok(ProxiedPeer::LoadBalancer);
    }
    let client = match *addresses {
        [a, b, c, d, _, _, _, _, high, low, _, _] => {
            SocketAddr::new(Ipv4Addr::new(a, b, c, d).into(), u16::from_be_bytes([high, low]))
        }
        [.., high, low, _, _] if family == 2 => {
            let mut octets = [0; 16];
            octets.copy_from_slice(&addresses[..16]);
            SocketAddr::new(IpAddr::V6(Ipv6Addr::from(octets)), u16::from_be_bytes([high, low]))
        }
        _ => return Ok(ProxiedPeer::LoadBalancer),
    };
    let ip = client.ip().to_canonical();
    if ip.is_unspecified() || ip.is_multicast() {
        return Err(ProxyHeaderError::Malformed("the source address is not one of a client"));
    }
    Ok(ProxiedPeer::Client(SocketAddr::new(ip, client.port())))
}

/// Checks that the additional fields (type, length, value) fill the header.
fn check_fields(mut fields: &[u8]) -> Result<(), ProxyHeaderError> {
    while !fields.is_empty() {
        let [_, high, low, rest @ ..] = fields else {
            return Err(ProxyHeaderError::Malformed("a field exceeds the header"));
        };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        fields = rest.get(length..).ok_or(ProxyHeaderError::Malformed("a field exceeds the header"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const V4: [u8; 12] = [203, 0, 113, 7, 10, 0, 0, 1, 0x1f, 0x90, 1, 187];

    fn v6() -> [u8; 36] {
        let mut bytes = [0; 36];
        bytes[..16].copy_from_slice(&"2001:db8::7".parse::<Ipv6Addr>().unwrap().octets());
        bytes[31] = 1;
        bytes[32..].copy_from_slice(&[0x1f, 0x90, 1, 187]);
        bytes
    }

    fn prefix(command: u8, family: u8, remaining: usize) -> [u8; PREFIX_BYTES] {
        let mut prefix = [0; PREFIX_BYTES];
        prefix[..12].copy_from_slice(&SIGNATURE);
        (prefix[12], prefix[13]) = (command, family);
        prefix[14..].copy_from_slice(&u16::try_from(remaining).unwrap().to_be_bytes());
        prefix
    }

    fn read(command: u8, family: u8, rest: &[u8]) -> Result<ProxiedPeer, ProxyHeaderError> {
        parse(&prefix(command, family, rest.len()), rest)
    }

    #[test]
    fn the_client_of_both_families_is_read_with_and_without_fields() {
        let client = |text: &str| Ok(ProxiedPeer::Client(text.parse().unwrap()));
        assert_eq!(read(0x21, 0x11, &V4), client("203.0.113.7:8080"));
        assert_eq!(read(0x21, 0x21, &v6()), client("[2001:db8::7]:8080"));
        let fields: &[u8] = &[0xea, 0, 3, 1, b'v', b'p', 0x04, 0, 0];
        assert_eq!(read(0x21, 0x11, &[&V4, fields].concat()), client("203.0.113.7:8080"));
        let mut mapped = v6();
        mapped[..16].copy_from_slice(&Ipv4Addr::new(203, 0, 113, 7).to_ipv6_mapped().octets());
        assert_eq!(read(0x21, 0x21, &mapped), client("203.0.113.7:8080"), "the limits see one address");
    }

    #[test]
    fn a_connection_of_the_load_balancer_itself_has_no_client() {
        for (command, family, rest) in
            [(0x20, 0x00, &[][..]), (0x20, 0x11, &V4), (0x21, 0x00, b"anything"), (0x21, 0x31, &[0; 216])]
        {
            assert_eq!(read(command, family, rest), Ok(ProxiedPeer::LoadBalancer), "{command:x} {family:x}");
        }
    }

    #[test]
    fn malformed_headers_are_rejected() {
        let malformed = |command, family, rest: &[u8]| match read(command, family, rest) {
            Err(ProxyHeaderError::Malformed(reason)) => reason,
            other => panic!("{command:x} {family:x} {rest:?}: {other:?}"),
        };
        assert!(malformed(0x11, 0x11, &V4).contains("version"));
        assert!(malformed(0x22, 0x11, &V4).contains("command"));
        assert!(malformed(0x21, 0x41, &V4).contains("family"));
        assert!(malformed(0x21, 0x12, &V4).contains("TCP"));
        assert!(malformed(0x21, 0x13, &V4).contains("TCP"));
        assert!(malformed(0x21, 0x11, &V4[..11]).contains("exceed"));
        assert!(malformed(0x21, 0x21, &V4).contains("exceed"));
        for fields in [&[1][..], &[1, 0], &[1, 0, 1], &[1, 0xff, 0xff, 0]] {
            assert!(malformed(0x21, 0x11, &[&V4, fields].concat()).contains("field exceeds"), "{fields:?}");
        }
        assert!(malformed(0x21, 0x11, &[0; 12]).contains("source"));
        let short = parse(&prefix(0x21, 0x11, 12), &V4[..11]);
        assert!(matches!(short, Err(ProxyHeaderError::Malformed(_))));
    }

    #[test]
    fn the_length_is_limited_before_the_header_is_read() {
        let at = HEADER_BYTES_MAX - PREFIX_BYTES;
        assert_eq!(remaining_bytes(&prefix(0x21, 0x11, at)), Ok(at));
        let past = remaining_bytes(&prefix(0x21, 0x11, at + 1));
        assert_eq!(past, Err(ProxyHeaderError::TooLong(HEADER_BYTES_MAX + 1)));
        assert_eq!(remaining_bytes(&prefix(0x21, 0x11, 65_535)), Err(ProxyHeaderError::TooLong(65_551)));
    }

    #[test]
    fn another_beginning_is_rejected_at_its_first_wrong_byte() {
        for (bytes, expected) in [
            (&b"GET / HTTP/1.1\r\n"[..], Err(ProxyHeaderError::Missing)),
            (b"G", Err(ProxyHeaderError::Missing)),
            (b"POST", Err(ProxyHeaderError::Missing)),
            (b"PRI * HTTP/2.0\r\n", Err(ProxyHeaderError::Missing)),
            (b"\x16\x03\x01", Err(ProxyHeaderError::Missing)),
            (b"PROXY TCP4 1.2.3", Err(ProxyHeaderError::Version1)),
            (b"PROXY ", Err(ProxyHeaderError::Version1)),
            (b"PRO", Ok(())),
            (b"\r\n\r\n\0\r\nQUI", Ok(())),
            (b"\r\n\r\n\0\r\nQUITX", Err(ProxyHeaderError::Missing)),
            (b"", Ok(())),
        ] {
            assert_eq!(check_beginning(bytes), expected, "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(
            command: u8, family: u8, declared in 0..2048_usize, rest in proptest::collection::vec(any::<u8>(), 0..300)
        ) {
            let _ = parse(&prefix(command, family, declared), &rest);
            let _ = parse(&prefix(command, family, rest.len()), &rest);
            let _ = check_beginning(&rest);
        }

        #[test]
        fn every_client_is_read_as_it_was_written(ip: [u8; 4], port: u16, fields in proptest::collection::vec(any::<u8>(), 0..40)) {
            let ip = Ipv4Addr::from(ip);
            prop_assume!(!ip.is_unspecified() && !ip.is_multicast());
            let mut rest = [&ip.octets()[..], &[10, 0, 0, 1], &port.to_be_bytes(), &[0, 80]].concat();
            rest.extend([0xe0, 0, fields.len() as u8]);
            rest.extend(&fields);
            prop_assert_eq!(read(0x21, 0x11, &rest), Ok(ProxiedPeer::Client(SocketAddr::new(ip.into(), port))));
        }
    }
}
