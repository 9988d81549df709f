//! Access control of the hub: which callers may use which path.
//!
//! Each path of the hub needs one level of access, and a bearer token grants one. Gateways and spokes share the fleet
//! token; operators have a token of their own, which also grants the access of the fleet token. The tokens travel over
//! plain HTTP, so they keep out callers that cannot read the network; mutual TLS is to replace them.
//!
//! A hub without a fleet token serves every client that can connect to it. It therefore listens on loopback only
//! ([`Tokens::may_listen_at`]), which limits its clients to the processes of one machine.

use std::fmt;
use std::net::IpAddr;

use crate::token::Token;

/// Access that a path of the hub requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Fleet token or operator token: registrations, leases, demand, and all reads.
    Fleet,
    /// Operator token: changes of deployments, tenants or drains.
    Operator,
}

/// Tokens that a hub accepts.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    /// Tokens of gateways and spokes; several during a token rotation.
    pub fleet: Vec<Token>,
    /// Token of operators; without it, no operator request is accepted.
    pub operator: Option<Token>,
}

/// Reason for denying a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The request carries no bearer token, or more than one `authorization` header.
    #[error(
        "the request carries no token: send one header `authorization: Bearer TOKEN` with {0} of this hub"
    )]
    NoToken(AcceptedToken),
    /// The token is none of this hub's tokens.
    #[error("the token is not {0} of this hub; compare the files or variables on both sides")]
    UnknownToken(AcceptedToken),
    /// The fleet token was sent where the operator token is required.
    #[error("this request changes what is deployed: the fleet token is not enough, send the operator token")]
    NotAnOperator,
    /// The hub has no operator token, so no operator request is accepted.
    #[error(
        "this hub accepts no changes: it has no operator_token_file in its configuration; add one and restart it"
    )]
    NoOperatorConfigured,
}

/// Text that names the accepted tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptedToken(Access);

impl fmt::Display for AcceptedToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Access::Fleet => "the fleet token or the operator token",
            Access::Operator => "the operator token",
        })
    }
}

/// A hub without a fleet token was configured to listen on an address that other machines can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0} can be reached from other machines, and without a fleet token every client there could register regions and \
     read API key hashes; set fleet_token_file or fleet_token_env, or listen on 127.0.0.1 or [::1]"
)]
pub struct NoFleetToken(pub IpAddr);

impl Tokens {
    /// Checks whether a hub with these tokens may listen at `address`.
    ///
    /// # Errors
    ///
    /// Fails if other machines can reach that address and there is no fleet token.
    pub fn may_listen_at(&self, address: IpAddr) -> Result<(), NoFleetToken> {
        if self.fleet.is_empty() && !address.is_loopback() { Err(NoFleetToken(address)) } else { Ok(()) }
    }

    /// Checks whether a request may use a path that requires `access`. `authorization` is the value of its only
    /// `authorization` header. All tokens are compared, each in constant time, so that timing does not reveal a partial
    /// match.
    ///
    /// # Errors
    ///
    /// The reason for the denial. It does not depend on the requested resource, so it discloses nothing else.
    pub fn check(&self, access: Access, authorization: Option<&[u8]>) -> Result<(), Denied> {
        if access == Access::Operator && self.operator.is_none() {
            return Err(Denied::NoOperatorConfigured);
        }
        if access == Access::Fleet && self.fleet.is_empty() {
            return Ok(());
        }
        let Some(presented) = authorization.filter(|value| value.starts_with(b"Bearer ")) else {
            return Err(Denied::NoToken(AcceptedToken(access)));
        };
        let operator = self.operator.iter().fold(false, |any, token| any | token.is_presented_by(presented));
        let fleet = self.fleet.iter().fold(false, |any, token| any | token.is_presented_by(presented));
        match (access, operator, fleet) {
            (_, true, _) | (Access::Fleet, _, true) => Ok(()),
            (Access::Operator, false, true) => Err(Denied::NotAnOperator),
            (_, false, false) => Err(Denied::UnknownToken(AcceptedToken(access))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLEET: &str = "fleet-token-0123456789";
    const NEXT: &str = "fleet-token-next-012345";
    const OPERATOR: &str = "operator-token-01234567";

    fn tokens(fleet: &[&str], operator: Option<&str>) -> Tokens {
        let read = |text: &&str| Token::read(text).unwrap();
        Tokens { fleet: fleet.iter().map(read).collect(), operator: operator.as_ref().map(read) }
    }

    #[test]
    fn each_token_grants_its_own_level_and_no_other() {
        let tokens = tokens(&[FLEET, NEXT], Some(OPERATOR));
        let check = |access, header: Option<&str>| tokens.check(access, header.map(str::as_bytes));
        let (fleet, operator) = (AcceptedToken(Access::Fleet), AcceptedToken(Access::Operator));
        for token in [FLEET, NEXT] {
            let header = format!("Bearer {token}");
            assert_eq!(check(Access::Fleet, Some(&header)), Ok(()));
            assert_eq!(check(Access::Operator, Some(&header)), Err(Denied::NotAnOperator));
        }
        let header = format!("Bearer {OPERATOR}");
        assert_eq!(check(Access::Fleet, Some(&header)), Ok(()));
        assert_eq!(check(Access::Operator, Some(&header)), Ok(()));
        for other in ["Bearer ", "Bearer fleet-token-012345678", "Bearer operator-token-012345678"] {
            assert_eq!(check(Access::Fleet, Some(other)), Err(Denied::UnknownToken(fleet)), "{other}");
            assert_eq!(check(Access::Operator, Some(other)), Err(Denied::UnknownToken(operator)), "{other}");
        }
        for none in [None, Some(""), Some(FLEET), Some("Basic fleet-token-0123456789")] {
            assert_eq!(check(Access::Fleet, none), Err(Denied::NoToken(fleet)), "{none:?}");
            assert_eq!(check(Access::Operator, none), Err(Denied::NoToken(operator)), "{none:?}");
        }
    }

    #[test]
    fn a_hub_without_an_operator_token_accepts_no_changes() {
        for tokens in [tokens(&[], None), tokens(&[FLEET], None)] {
            for header in [None, Some(format!("Bearer {FLEET}"))] {
                let header = header.as_deref().map(str::as_bytes);
                assert_eq!(tokens.check(Access::Operator, header), Err(Denied::NoOperatorConfigured));
            }
        }
    }

    #[test]
    fn a_hub_without_a_fleet_token_serves_loopback_only() {
        let (none, some) = (tokens(&[], Some(OPERATOR)), tokens(&[FLEET], None));
        assert_eq!(none.check(Access::Fleet, None), Ok(()));
        for (address, loopback) in
            [("127.0.0.1", true), ("::1", true), ("0.0.0.0", false), ("::", false), ("10.0.0.1", false)]
        {
            let address = address.parse().unwrap();
            assert_eq!(none.may_listen_at(address).is_ok(), loopback, "{address}");
            assert_eq!(some.may_listen_at(address), Ok(()));
        }
    }
}
