//! Demand of tenants at a gateway, and the gateway's shares of their rate limits.
//!
//! A gateway reports the demand of the tenants with limits and traffic, and the generation of the shares that it applies,
//! which acknowledges them. The response carries the shares that are newer, if there are any.

use std::collections::BTreeMap;

use regions::tenant::{LimitShare, MAX_TENANTS, PerLimit};
use regions::{Generation, RegionId, TenantId};
use serde::{Deserialize, Serialize};

use super::super::report::GATEWAYS_MAX;
use super::super::{MessageVersion, VERSION, WireError, entries, parsed};

/// `POST /v1/tenant-demand`; also the stored record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantDemandV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Region of the gateway.
    pub gateway: String,
    /// Random number of the gateway, which is on its disk with its shares.
    pub instance: u64,
    /// Generation of the shares that the gateway applies; absent if it was never given any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<String>,
    /// Tenants with limits and traffic.
    pub tenants: Vec<TenantUsageV1>,
}

/// Demand of one tenant in units per minute, admitted or rejected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantUsageV1 {
    /// Name of the tenant.
    pub tenant: String,
    /// Requests per minute.
    pub requests: u64,
    /// Inputs per minute.
    pub inputs: u64,
    /// Tokens per minute.
    pub tokens: u64,
}

/// Response to [`TenantDemandV1`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharesResponseV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Number of gateways that the hub knows, with this one.
    pub gateways: u32,
    /// Shares newer than those that the gateway applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<TenantSharesV1>,
}

/// Shares of one gateway; also the stored record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantSharesV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Epoch of the generation.
    pub epoch: u64,
    /// Number of the generation within the epoch.
    pub generation: u64,
    /// Region of the gateway.
    pub gateway: String,
    /// Random number of the gateway.
    pub instance: u64,
    /// Number of gateways that share the limits.
    pub gateways: u32,
    /// Number of the generation from which on changes can be sent.
    pub base: u64,
    /// Generation to which these are the changes; absent if the message is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changes_since: Option<String>,
    /// Share in the limits of every tenant that is not listed, in millionths.
    pub default: u32,
    /// Shares in the limits of tenants, in millionths.
    pub tenants: Vec<TenantShareV1>,
}

/// Shares in the limits of one tenant, in millionths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantShareV1 {
    /// Name of the tenant.
    pub tenant: String,
    /// Share of the requests.
    pub requests: u32,
    /// Share of the inputs.
    pub inputs: u32,
    /// Share of the tokens.
    pub tokens: u32,
    /// Number of the generation that changed them last.
    pub since: u64,
}

/// `GET /v1/tenant-shares`: the shares of all gateways, for operators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllSharesV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Shares of each gateway.
    pub gateways: Vec<TenantSharesV1>,
}

/// Gateway, as it stays over its restarts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GatewayInstance {
    /// Its region.
    pub region: RegionId,
    /// Random number that is on its disk.
    pub id: u64,
}

/// Demand of the tenants at one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantDemand {
    /// The gateway.
    pub gateway: GatewayInstance,
    /// Generation of the shares that it applies.
    pub running: Option<Generation>,
    /// Units per minute.
    pub tenants: BTreeMap<TenantId, PerLimit<u64>>,
}

/// Shares of one gateway in the limits of all tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantShares {
    /// Generation of the shares.
    pub generation: Generation,
    /// The gateway.
    pub gateway: GatewayInstance,
    /// Number of gateways that share the limits.
    pub gateways: u32,
    /// Number of the generation from which on changes can be sent.
    pub base: u64,
    /// Generation to which these are the changes; `None` if they are complete.
    pub changes_since: Option<Generation>,
    /// Share of a tenant that is not listed.
    pub default: LimitShare,
    /// Shares of tenants.
    pub tenants: BTreeMap<TenantId, TenantShare>,
}

/// Shares in the limits of one tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantShare {
    /// The shares.
    pub limits: PerLimit<LimitShare>,
    /// Number of the generation that changed them last.
    pub since: u64,
}

impl TenantShares {
    /// Returns the shares of a tenant.
    pub fn of(&self, tenant: &TenantId) -> PerLimit<LimitShare> {
        self.tenants.get(tenant).map_or(PerLimit::each(|| self.default), |share| share.limits)
    }

    /// Returns what a gateway that applies the shares of generation `running` lacks: `None` if nothing, the changes where
    /// they suffice, or else all shares.
    pub fn newer_than(&self, running: Option<Generation>) -> Option<TenantShares> {
        let Some(running) = running else { return Some(self.clone()) };
        if running >= self.generation {
            return None;
        }
        if running.epoch != self.generation.epoch || running.number < self.base {
            return Some(self.clone());
        }
        let changed = self.tenants.iter().filter(|(_, share)| share.since > running.number);
        let tenants = changed.map(|(tenant, share)| (tenant.clone(), *share)).collect();
        Some(TenantShares { changes_since: Some(running), tenants, ..self.clone() })
    }

    /// Completes changes with the shares that they change.
    ///
    /// # Errors
    ///
    /// If the changes are to other shares.
    pub fn complete(&mut self, current: Option<&TenantShares>) -> Result<(), String> {
        let Some(since) = self.changes_since.take() else { return Ok(()) };
        let current =
            current.filter(|current| current.generation == since && current.gateway == self.gateway);
        let current =
            current.ok_or_else(|| format!("it has changes to generation {since}, which is not current"))?;
        for (tenant, share) in &current.tenants {
            self.tenants.entry(tenant.clone()).or_insert(*share);
        }
        Ok(())
    }
}

impl From<&TenantDemand> for TenantDemandV1 {
    fn from(demand: &TenantDemand) -> TenantDemandV1 {
        let TenantDemand { gateway: GatewayInstance { region, id }, running, tenants } = demand;
        let usage = |(tenant, units): (&TenantId, &PerLimit<u64>)| {
            let PerLimit { requests, inputs, tokens } = *units;
            TenantUsageV1 { tenant: tenant.to_string(), requests, inputs, tokens }
        };
        TenantDemandV1 {
            version: VERSION,
            gateway: region.to_string(),
            instance: *id,
            running: running.map(|running| running.to_string()),
            tenants: tenants.iter().map(usage).collect(),
        }
    }
}

impl TryFrom<TenantDemandV1> for TenantDemand {
    type Error = WireError;

    fn try_from(wire: TenantDemandV1) -> Result<TenantDemand, WireError> {
        let TenantDemandV1 { version: _, gateway, instance, running, tenants } = wire;
        let tenants = entries("tenants", ".tenant", tenants, MAX_TENANTS, |at, usage| {
            let TenantUsageV1 { tenant, requests, inputs, tokens } = usage;
            Ok((parsed(format!("{at}.tenant"), &tenant)?, PerLimit { requests, inputs, tokens }))
        })?;
        Ok(TenantDemand {
            gateway: GatewayInstance { region: parsed("gateway", &gateway)?, id: instance },
            running: running.map(|running| parsed("running", &running)).transpose()?,
            tenants,
        })
    }
}

impl From<&TenantShares> for TenantSharesV1 {
    fn from(shares: &TenantShares) -> TenantSharesV1 {
        let TenantShares { generation, gateway, gateways, base, changes_since, default, tenants } = shares;
        let share = |(tenant, share): (&TenantId, &TenantShare)| {
            let TenantShare { limits, since } = *share;
            let PerLimit { requests, inputs, tokens } = limits.map(LimitShare::millionths);
            TenantShareV1 { tenant: tenant.to_string(), requests, inputs, tokens, since }
        };
        TenantSharesV1 {
            version: VERSION,
            epoch: generation.epoch,
            generation: generation.number,
            gateway: gateway.region.to_string(),
            instance: gateway.id,
            gateways: *gateways,
            base: *base,
            changes_since: changes_since.map(|since| since.to_string()),
            default: default.millionths(),
            tenants: tenants.iter().map(share).collect(),
        }
    }
}

impl TryFrom<TenantSharesV1> for TenantShares {
    type Error = WireError;

    fn try_from(wire: TenantSharesV1) -> Result<TenantShares, WireError> {
        let TenantSharesV1 {
            version: _,
            epoch,
            generation: number,
            gateway,
            instance,
            gateways,
            base,
            changes_since,
            default,
            tenants,
        } = wire;
        let tenants = entries("tenants", ".tenant", tenants, MAX_TENANTS, |at, share| {
            let TenantShareV1 { tenant, requests, inputs, tokens, since } = share;
            let limits = PerLimit {
                requests: limit_share(format!("{at}.requests"), requests)?,
                inputs: limit_share(format!("{at}.inputs"), inputs)?,
                tokens: limit_share(format!("{at}.tokens"), tokens)?,
            };
            Ok((parsed(format!("{at}.tenant"), &tenant)?, TenantShare { limits, since }))
        })?;
        if !(1..=GATEWAYS_MAX).contains(&(gateways as usize)) {
            let problem = format!("{gateways} is out of range; write 1 to {GATEWAYS_MAX}");
            return Err(WireError::new("gateways", problem));
        }
        Ok(TenantShares {
            generation: Generation { epoch, number },
            gateway: GatewayInstance { region: parsed("gateway", &gateway)?, id: instance },
            gateways,
            base,
            changes_since: changes_since.map(|since| parsed("changes_since", &since)).transpose()?,
            default: limit_share("default", default)?,
            tenants,
        })
    }
}

fn limit_share(field: impl Into<String>, millionths: u32) -> Result<LimitShare, WireError> {
    LimitShare::new(millionths).ok_or_else(|| {
        WireError::new(field, format!("{millionths} is out of range; write 1 to 1000000 millionths"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::any;
    use super::*;
    use proptest::collection::btree_map;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn units() -> impl Strategy<Value = PerLimit<u64>> {
        any::<(u64, u64, u64)>().prop_map(|(requests, inputs, tokens)| PerLimit { requests, inputs, tokens })
    }

    fn tenant_id() -> impl Strategy<Value = TenantId> {
        "[a-z0-9._-]{1,32}".prop_map(|text| text.parse().unwrap())
    }

    fn one_share() -> impl Strategy<Value = LimitShare> {
        (1..=1_000_000u32).prop_map(|millionths| LimitShare::new(millionths).unwrap())
    }

    prop_compose! {
        fn shares()(
            (epoch, number, base, id) in any::<(u64, u64, u64, u64)>(),
            region in any::region(),
            gateways in 1..=GATEWAYS_MAX as u32,
            default in one_share(),
            tenants in btree_map(tenant_id(), (one_share(), any::<u64>()), 0..4),
        ) -> TenantShares {
            let share = |(tenant, (share, since))| (tenant, TenantShare { limits: PerLimit::each(|| share), since });
            let tenants = tenants.into_iter().map(share).collect();
            let (generation, gateway) = (Generation { epoch, number }, GatewayInstance { region, id });
            TenantShares { generation, gateway, gateways, base, changes_since: None, default, tenants }
        }
    }

    proptest! {
        #[test]
        fn tenant_demand_survives_a_round_trip(
            region in any::region(), id: u64, epoch: u64, number: u64, tenants in btree_map(tenant_id(), units(), 0..4),
        ) {
            let running = Some(Generation { epoch, number });
            let demand = TenantDemand { gateway: GatewayInstance { region, id }, running, tenants };
            let text = serde_json::to_string(&TenantDemandV1::from(&demand)).unwrap();
            let wire: TenantDemandV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(TenantDemand::try_from(wire), Ok(demand));
        }

        #[test]
        fn tenant_shares_survive_a_round_trip(shares in shares()) {
            let text = serde_json::to_string(&TenantSharesV1::from(&shares)).unwrap();
            let wire: TenantSharesV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(TenantShares::try_from(wire), Ok(shares));
        }
    }

    fn demand() -> Value {
        let usage = json!({"tenant": "acme", "requests": 1, "inputs": 2, "tokens": 3});
        json!({"version": 1, "gateway": "aws/us-east-1", "instance": 7, "running": "1.4", "tenants": [usage]})
    }

    #[test]
    fn forged_demand_is_rejected() {
        let read = |message: Value| {
            let wire =
                serde_json::from_value::<TenantDemandV1>(message).map_err(|error| error.to_string())?;
            TenantDemand::try_from(wire).map_err(|error| error.to_string())
        };
        assert!(read(demand()).is_ok());
        let check = |pointer: &str, value: Value, part: &str| {
            let mut message = demand();
            *message.pointer_mut(pointer).unwrap() = value;
            let error = read(message).unwrap_err();
            assert!(error.contains(part), "{part} in {error}");
        };
        check("/tenants/0/requests", json!(-1), "u64");
        check("/tenants/0/requests", json!(0.5), "u64");
        check("/tenants/0/tokens", json!(null), "u64");
        check("/tenants/0/tokens", json!("NaN"), "u64");
        check("/tenants/0/tenant", json!("a b"), "tenants[0].tenant");
        check("/running", json!("1"), "`running`");
        check("/gateway", json!("mars"), "`gateway`");
        let usage = demand()["tenants"][0].clone();
        check("/tenants", json!([usage, usage]), "listed twice");
        check("/tenants", json!(vec![usage; 100_000]), "at most 4000");
        assert!(
            serde_json::from_str::<TenantDemandV1>(&demand().to_string().replace(":3}", ":NaN}")).is_err()
        );
    }

    #[test]
    fn forged_shares_are_rejected() {
        let share = json!({"tenant": "acme", "requests": 1, "inputs": 2, "tokens": 3, "since": 4});
        let message = json!({"version": 1, "epoch": 1, "generation": 4, "gateway": "aws/us-east-1", "instance": 7,
                             "gateways": 2, "base": 1, "default": 500_000, "tenants": [share]});
        let check = |pointer: &str, value: Value, field: Option<&str>| {
            let mut message = message.clone();
            *message.pointer_mut(pointer).unwrap() = value;
            let wire: TenantSharesV1 = serde_json::from_value(message).unwrap();
            assert_eq!(TenantShares::try_from(wire).err().map(|error| error.field).as_deref(), field);
        };
        check("/default", json!(1_000_000), None);
        check("/default", json!(0), Some("default"));
        check("/default", json!(1_000_001), Some("default"));
        check("/gateways", json!(0), Some("gateways"));
        check("/tenants/0/inputs", json!(0), Some("tenants[0].inputs"));
        check("/tenants/0/tenant", json!(""), Some("tenants[0].tenant"));
    }

    #[test]
    fn a_gateway_receives_the_changes_since_its_own_generation_or_everything() {
        let share = |millionths, since| TenantShare {
            limits: PerLimit::each(|| LimitShare::new(millionths).unwrap()),
            since,
        };
        let id = |name: &str| name.parse::<TenantId>().unwrap();
        let at = |number| Generation { epoch: 2, number };
        let mut shares = TenantShares {
            generation: at(9),
            gateway: GatewayInstance { region: "aws/us-east-1".parse().unwrap(), id: 1 },
            gateways: 4,
            base: 5,
            changes_since: None,
            default: LimitShare::equal(4),
            tenants: BTreeMap::from([(id("a"), share(10, 6)), (id("b"), share(20, 9))]),
        };
        let old = TenantShares {
            generation: at(7),
            tenants: BTreeMap::from([(id("a"), share(10, 6)), (id("b"), share(30, 7))]),
            ..shares.clone()
        };
        assert_eq!(shares.newer_than(Some(at(9))), None);
        assert_eq!(shares.newer_than(Some(Generation { epoch: 3, number: 1 })), None);
        for whole in [None, Some(at(4)), Some(Generation { epoch: 1, number: 8 })] {
            assert_eq!(shares.newer_than(whole).as_ref(), Some(&shares), "{whole:?}");
        }
        let mut changes = shares.newer_than(Some(at(7))).unwrap();
        assert_eq!((changes.changes_since, changes.tenants.len()), (Some(at(7)), 1));
        let mut other = changes.clone();
        assert!(other.complete(None).unwrap_err().contains("2.7"));
        changes.complete(Some(&old)).unwrap();
        assert_eq!(changes, shares);
        shares.default = LimitShare::WHOLE;
        assert_eq!(shares.of(&id("c")).tokens, LimitShare::WHOLE);
    }
}
