//! Paths of the hub, and the paths of a spoke that gateways and other spokes call.
//!
//! A parameter is in braces, as the hub's router takes it. The functions return a path with its parameters and its
//! query, and [`RoutesQuery`] and [`holder`] parse the queries. No value needs escaping.

use std::time::Duration;

use regions::id::MAX_NAME_LEN;
use regions::spiffe::Role;
use regions::{DeploymentName, Generation, RegionId, TenantId};

use super::lease::{LeaseHolder, LeaseId};
use super::reader::Reader;
use super::usage::{QUERY_DAYS_MAX, UsageDay};
use super::{WireError, parsed};

/// Liveness probe of the hub, and of gateways and spokes, which serve these three paths as well.
pub const LIVEZ: &str = "/livez";
/// Readiness probe.
pub const READYZ: &str = "/readyz";
/// Metrics of the process.
pub const METRICS: &str = "/metrics";
/// Explanation of a request, at the operations port of a gateway.
pub const EXPLAIN: &str = "/explain/{*id}";
/// Search for requests whose explanation is kept, at the operations port of a gateway.
pub const REQUESTS: &str = "/requests";
/// Registration of a spoke (`POST`).
pub const SPOKES: &str = "/v1/spokes";
/// End of a lease (`DELETE`).
pub const LEASE: &str = "/v1/leases/{lease}";
/// Renewal of a lease (`POST`).
pub const KEEP_ALIVE: &str = "/v1/leases/{lease}/keepalive";
/// Long poll of the route table.
pub const ROUTES: &str = "/v1/routes";
/// Deregistration of a reader (`DELETE`).
pub const READER: &str = "/v1/readers/{*reader}";
/// Applied deployments.
pub const DEPLOYMENTS: &str = "/v1/deployments";
/// Applied tenants.
pub const TENANTS: &str = "/v1/tenants";
/// Pending changes, readers and replicas.
pub const ROLLOUT: &str = "/v1/rollout";
/// Complete traffic plan.
pub const PLAN: &str = "/v1/plan";
/// Demand of a gateway (`POST`); the response has its rows of the plan.
pub const DEMAND: &str = "/v1/demand";
/// Demand of tenants at a gateway (`POST`); the response has its shares of their rate limits.
pub const TENANT_DEMAND: &str = "/v1/tenant-demand";
/// Shares of all gateways in the tenants' rate limits.
pub const TENANT_SHARES: &str = "/v1/tenant-shares";
/// Usage of tenants by day (`GET`), and the report of a gateway, or of a spoke with a queue of jobs (`POST`).
pub const USAGE: &str = "/v1/usage";
/// Traffic of a gateway for the console (`POST`); the response asks for routing decisions.
pub const TRAFFIC: &str = "/v1/traffic";
/// Link that signs a browser in to the console of this hub (`POST`).
pub const CONSOLE_LOGINS: &str = "/v1/console-logins";
/// Change of deployments and tenants (`POST`).
pub const APPLY: &str = "/v1/apply";
/// Created API keys (`GET`), and creation of one (`POST`).
pub const KEYS: &str = "/v1/keys";
/// Revocation of an API key (`DELETE`).
pub const KEY: &str = "/v1/keys/{id}";
/// Promotion of the next model of a deployment (`POST`).
pub const PROMOTE: &str = "/v1/deployments/{name}/promote";
/// Drain of a region (`PUT`) and its end (`DELETE`).
pub const DRAIN: &str = "/v1/drains/{cloud}/{name}";
/// Join with a token (`POST`), on the listener of the authority, like the other paths below `/v1/pki`.
pub const JOIN: &str = "/v1/pki/join";
/// Renewal of the caller's certificate (`POST`).
pub const RENEW: &str = "/v1/pki/renew";
/// Certificate for the replicas that the calling spoke starts (`POST`).
pub const REPLICA: &str = "/v1/pki/replica";
/// Long poll of the trusted authorities and revoked certificates.
pub const TRUST: &str = "/v1/pki/trust";
/// Creation of a join token (`POST`).
pub const JOIN_TOKENS: &str = "/v1/pki/tokens";
/// Issued certificates.
pub const CERTIFICATES: &str = "/v1/pki/certificates";
/// Revocation (`POST`).
pub const REVOKE: &str = "/v1/pki/revoke";
/// Phase of the rotation of the authority, and its next step (`POST`).
pub const ROTATION: &str = "/v1/pki/rotation";
/// Content of the store, for a backup.
pub const BACKUP: &str = "/v1/backup";
/// Exchange of a gateway with a region (`POST`).
pub const EXCHANGE: &str = "/spoke/v1/exchange";
/// Exchange of the spoke that scales a region with another spoke of that region (`POST`).
pub const PEER_EXCHANGE: &str = "/spoke/v1/peers";
/// Jobs that other regions may compute, from the region of their queue to a gateway.
pub const JOBS_WAITING: &str = "/spoke/v1/jobs/waiting";
/// A request of such a job, with a ticket.
pub const JOBS_PULL: &str = "/spoke/v1/jobs/pull";
/// Renewal of a ticket.
pub const JOBS_RENEW: &str = "/spoke/v1/jobs/renew";
/// The response to a request, which ends its ticket.
pub const JOBS_RESULT: &str = "/spoke/v1/jobs/result";

/// Method and path of the hub, with the roles that may use it.
#[derive(Clone, Copy, Debug)]
pub struct HubEndpoint {
    /// Method.
    pub method: &'static str,
    /// Path.
    pub path: &'static str,
    /// Roles.
    pub roles: &'static [Role],
}

const fn endpoint(method: &'static str, path: &'static str, roles: &'static [Role]) -> HubEndpoint {
    HubEndpoint { method, path, roles }
}

/// Roles that follow the route table.
const READERS: &[Role] = &[Role::Gateway, Role::Spoke];
/// Roles that read the state of the fleet.
const VIEWERS: &[Role] = &[Role::Viewer, Role::Operator];
const OPERATORS: &[Role] = &[Role::Operator];

/// All endpoints of the hub. A request to another pair of method and path is rejected. A spoke and a gateway moreover act
/// only for the region in their certificate.
pub const HUB_ENDPOINTS: &[HubEndpoint] = &[
    endpoint("GET", LIVEZ, &Role::ALL),
    endpoint("GET", READYZ, &Role::ALL),
    endpoint("GET", METRICS, &Role::ALL),
    endpoint("POST", SPOKES, &[Role::Spoke]),
    endpoint("POST", KEEP_ALIVE, &[Role::Spoke]),
    endpoint("DELETE", LEASE, &[Role::Spoke]),
    endpoint("GET", ROUTES, &[Role::Gateway, Role::Spoke, Role::Viewer, Role::Operator]),
    endpoint("DELETE", READER, READERS),
    endpoint("GET", DEPLOYMENTS, VIEWERS),
    endpoint("GET", TENANTS, VIEWERS),
    endpoint("GET", ROLLOUT, VIEWERS),
    endpoint("GET", PLAN, VIEWERS),
    endpoint("POST", DEMAND, &[Role::Gateway]),
    endpoint("POST", TENANT_DEMAND, &[Role::Gateway]),
    endpoint("GET", TENANT_SHARES, VIEWERS),
    endpoint("GET", USAGE, VIEWERS),
    endpoint("POST", USAGE, &[Role::Gateway, Role::Spoke]),
    endpoint("POST", TRAFFIC, &[Role::Gateway]),
    endpoint("POST", CONSOLE_LOGINS, VIEWERS),
    endpoint("POST", APPLY, OPERATORS),
    endpoint("GET", KEYS, VIEWERS),
    endpoint("POST", KEYS, OPERATORS),
    endpoint("DELETE", KEY, OPERATORS),
    endpoint("POST", PROMOTE, OPERATORS),
    endpoint("PUT", DRAIN, OPERATORS),
    endpoint("DELETE", DRAIN, OPERATORS),
];

/// Returns the roles that may send `method` to `path` of the hub; `None` if there is no such endpoint.
pub fn roles(method: &str, path: &str) -> Option<&'static [Role]> {
    // Servers respond to HEAD as to GET.
    let method = if method == "HEAD" { "GET" } else { method };
    let found = HUB_ENDPOINTS.iter().find(|known| known.method == method && known.path == path);
    found.map(|known| known.roles)
}

/// Maximum time for which the hub holds a poll of the route table, whatever the query says.
pub const POLL_WAIT_MAX: Duration = Duration::from_secs(30);

/// Returns the path and query at which `holder` renews its lease.
pub fn keep_alive(lease: LeaseId, holder: &LeaseHolder) -> String {
    format!("{}?holder={holder}", KEEP_ALIVE.replace("{lease}", &lease.to_string()))
}

/// Returns the path and query at which `holder` ends its lease.
pub fn lease(lease: LeaseId, holder: &LeaseHolder) -> String {
    format!("{}?holder={holder}", LEASE.replace("{lease}", &lease.to_string()))
}

/// Returns the path and query of the long poll for a table newer than `after`; the hub holds the request for up to
/// `wait`. A reader without a table does not name itself, because it runs none yet. With `changes`, the response may
/// have the changes of table `after` ([`crate::route::changes`]).
pub fn routes(after: Option<Generation>, reader: &Reader, changes: bool, wait: Duration) -> String {
    let has = after.map_or(String::new(), |after| format!("after={after}&reader={reader}&"));
    let changes = if changes { "changes=true&" } else { "" };
    format!("{ROUTES}?{has}{changes}wait_ms={}", wait.as_millis())
}

/// Returns the path at which `reader` deregisters.
pub fn reader(reader: &Reader) -> String {
    READER.replace("{*reader}", &reader.to_string())
}

/// Returns the path and query at which a gateway reports its demand. `after` is the generation of its rows.
pub fn demand(after: Option<Generation>) -> String {
    after.map_or(DEMAND.to_owned(), |after| format!("{DEMAND}?after={after}"))
}

/// Query of the usage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageQuery {
    /// First day.
    pub from: UsageDay,
    /// Last day, which is included.
    pub to: UsageDay,
    /// Only this tenant; all if absent.
    pub tenant: Option<TenantId>,
}

/// Parameters of a query of the usage.
const USAGE_PARAMETERS: [&str; 3] = ["from", "to", "tenant"];

impl UsageQuery {
    /// Parses a query. Without `to` the last day is `today`, without `from` the first one is 30 days before the last.
    ///
    /// # Errors
    ///
    /// The first parameter that is unknown or given twice, the first invalid value, or more than [`QUERY_DAYS_MAX`] days.
    pub fn parse(query: &str, today: UsageDay) -> Result<UsageQuery, WireError> {
        let mut given: [Option<&str>; 3] = [None; 3];
        for (name, value) in parameters(query) {
            let Some(at) = USAGE_PARAMETERS.iter().position(|known| *known == name) else {
                let name: String = name.chars().take(MAX_NAME_LEN).collect();
                let known = USAGE_PARAMETERS.join(", ");
                return Err(WireError::new("query", format!("unknown parameter {name:?}; write {known}")));
            };
            if given[at].replace(value).is_some() {
                return Err(WireError::new(name, "is given twice; write it once"));
            }
        }
        let [from, to, tenant] = given;
        let day =
            |name: &str, value: Option<&str>| value.map(|value| parsed::<UsageDay>(name, value)).transpose();
        let to = day("to", to)?.unwrap_or(today);
        let from = day("from", from)?.unwrap_or(to.before(30));
        if from > to {
            return Err(WireError::new("from", format!("{from} is after {to}; write an earlier day")));
        }
        if to.0 - from.0 >= QUERY_DAYS_MAX {
            let problem =
                format!("{from} to {to} are more than {QUERY_DAYS_MAX} days; ask for fewer at a time");
            return Err(WireError::new("from", problem));
        }
        let tenant = tenant.map(|tenant| parsed("tenant", tenant)).transpose()?;
        Ok(UsageQuery { from, to, tenant })
    }
}

/// Returns the path of the promotion of `deployment`.
pub fn promote(deployment: &DeploymentName) -> String {
    PROMOTE.replace("{name}", deployment.as_str())
}

/// Returns the path of the API key with this identifier.
pub fn key(id: &str) -> String {
    KEY.replace("{id}", id)
}

/// Returns the path of the drain of `region`.
pub fn drain(region: &RegionId) -> String {
    DRAIN.replace("{cloud}", region.cloud()).replace("{name}", region.name())
}

/// Returns the path and query of the long poll for a trusted state newer than `after`, which the caller applies.
pub fn trust(after: Option<u64>, wait: Duration) -> String {
    let has = after.map_or(String::new(), |after| format!("after={after}&"));
    format!("{TRUST}?{has}wait_ms={}", wait.as_millis())
}

/// Query of a poll of the trusted state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrustQuery {
    /// Generation that the response must exceed, and that the caller applies.
    pub after: Option<u64>,
    /// Time for which the hub holds the request, at most [`POLL_WAIT_MAX`].
    pub wait: Duration,
}

impl TrustQuery {
    /// Parses a query; all its values are optional.
    ///
    /// # Errors
    ///
    /// The first invalid value.
    pub fn parse(query: &str) -> Result<TrustQuery, WireError> {
        let mut found = TrustQuery::default();
        for (key, value) in pairs(query) {
            match key {
                "after" => found.after = Some(parsed(key, value)?),
                "wait_ms" => found.wait = Duration::from_millis(parsed(key, value)?).min(POLL_WAIT_MAX),
                _ => {}
            }
        }
        Ok(found)
    }
}

/// Query of a poll of the route table, and of a demand report, which has `after` only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutesQuery {
    /// Generation that the response must exceed; a reader that sends it runs that table.
    pub after: Option<Generation>,
    /// Time for which the hub holds the request, at most [`POLL_WAIT_MAX`].
    pub wait: Duration,
    /// Sender of the poll.
    pub reader: Option<Reader>,
    /// Whether the response may have changes instead of the whole table.
    pub changes: bool,
}

impl RoutesQuery {
    /// Parses a query; all its values are optional.
    ///
    /// # Errors
    ///
    /// The first invalid value.
    pub fn parse(query: &str) -> Result<RoutesQuery, WireError> {
        let mut found = RoutesQuery::default();
        for (key, value) in pairs(query) {
            match key {
                "after" => found.after = Some(parsed(key, value)?),
                "wait_ms" => {
                    let wait_ms = value
                        .parse()
                        .map_err(|_| WireError::new(key, "write a number of milliseconds, such as 20000"))?;
                    found.wait = Duration::from_millis(wait_ms).min(POLL_WAIT_MAX);
                }
                "reader" => found.reader = Some(parsed(key, value)?),
                "changes" => found.changes = parsed(key, value)?,
                _ => {}
            }
        }
        Ok(found)
    }
}

/// Parses the holder in the query of a lease.
///
/// # Errors
///
/// If it is missing or names no spoke.
pub fn holder(query: &str) -> Result<LeaseHolder, WireError> {
    let given = pairs(query).find(|(key, _)| *key == "holder");
    parsed("holder", given.map_or("", |(_, value)| value))
}

/// Returns the parameters of a query with their values, also those without one.
fn parameters(query: &str) -> impl Iterator<Item = (&str, &str)> {
    let given = query.split('&').filter(|parameter| !parameter.is_empty());
    given.map(|parameter| parameter.split_once('=').unwrap_or((parameter, "")))
}

fn pairs(query: &str) -> impl Iterator<Item = (&str, &str)> {
    query.split('&').filter_map(|pair| pair.split_once('='))
}

#[cfg(test)]
mod tests {
    use super::super::reader::Role;
    use super::*;

    /// Paths as text, so that a change of one is noticed.
    #[test]
    fn paths_have_their_parameters_and_queries() {
        let region: RegionId = "aws/us-east-1".parse().unwrap();
        let spoke = LeaseHolder { region: region.clone(), boot_id: 255 };
        let own = Reader { role: Role::Spoke, region: region.clone(), boot_id: 255 };
        let (id, after) = (LeaseId::from_random(1), Some(Generation { epoch: 1, number: 4 }));
        let wait = Duration::from_secs(5);
        let lease_path = "/v1/leases/00000000000000000000000000000001";
        let boot = "spoke/aws/us-east-1/00000000000000ff";
        assert_eq!(keep_alive(id, &spoke), format!("{lease_path}/keepalive?holder={boot}"));
        assert_eq!(lease(id, &spoke), format!("{lease_path}?holder={boot}"));
        assert_eq!(routes(None, &own, false, wait), "/v1/routes?wait_ms=5000");
        let has = format!("after=1.4&reader={boot}");
        assert_eq!(routes(after, &own, false, wait), format!("/v1/routes?{has}&wait_ms=5000"));
        assert_eq!(routes(after, &own, true, wait), format!("/v1/routes?{has}&changes=true&wait_ms=5000"));
        assert_eq!(reader(&own), format!("/v1/readers/{boot}"));
        assert_eq!([demand(None), demand(after)], ["/v1/demand", "/v1/demand?after=1.4"]);
        assert_eq!(promote(&"a.b".parse().unwrap()), "/v1/deployments/a.b/promote");
        assert_eq!([KEYS, &key("00ff")], ["/v1/keys", "/v1/keys/00ff"]);
        assert_eq!(drain(&region), "/v1/drains/aws/us-east-1");
        assert_eq!(
            [
                LIVEZ,
                READYZ,
                METRICS,
                SPOKES,
                DEPLOYMENTS,
                TENANTS,
                ROLLOUT,
                PLAN,
                TENANT_DEMAND,
                TENANT_SHARES,
                APPLY,
                EXCHANGE
            ],
            [
                "/livez",
                "/readyz",
                "/metrics",
                "/v1/spokes",
                "/v1/deployments",
                "/v1/tenants",
                "/v1/rollout",
                "/v1/plan",
                "/v1/tenant-demand",
                "/v1/tenant-shares",
                "/v1/apply",
                "/spoke/v1/exchange"
            ]
        );
    }

    #[test]
    fn the_usage_of_at_most_92_days_is_queried() {
        let [today, from]: [UsageDay; 2] = ["2026-11-26", "2026-10-01"].map(|day| day.parse().unwrap());
        let query = |text: &str| UsageQuery::parse(text, today);
        let tenant = |name: &str| Some(name.parse().unwrap());
        let all = UsageQuery { from, to: today, tenant: None };
        assert_eq!(query("from=2026-10-01&to=2026-11-26"), Ok(all.clone()));
        assert_eq!(
            query("tenant=acme-search&from=2026-10-01&"),
            Ok(UsageQuery { tenant: tenant("acme-search"), ..all })
        );
        assert_eq!(query(""), Ok(UsageQuery { from: today.before(30), to: today, tenant: None }));
        assert_eq!(
            query(&format!("from={}", today.before(QUERY_DAYS_MAX - 1))).map(|query| query.to),
            Ok(today)
        );
        for text in
            [format!("from={}", today.before(QUERY_DAYS_MAX)), "from=2026-11-27".into(), "from=x".into()]
        {
            assert_eq!(query(&text).unwrap_err().field, "from", "{text}");
        }
        assert_eq!(query("to=").unwrap_err().field, "to");
    }

    #[test]
    fn unknown_parameters_and_hostile_values_of_a_query_of_usage_are_rejected() {
        let today = UsageDay(20_000);
        let problem = |text: &str| UsageQuery::parse(text, today).unwrap_err();
        for text in ["tennant=acme", "acme", "tenant%3Dacme", "=acme", "from =2026-11-01"] {
            let error = problem(text);
            assert_eq!(error.field, "query", "{text}");
            assert!(error.problem.contains("unknown parameter"), "{error}");
            assert!(error.problem.contains("write from, to, tenant"), "{error}");
        }
        for value in ["", "a b", "a%20b", "(other)", "a/../b", "\u{202e}acme", "acme;drop", "a=b"] {
            assert_eq!(problem(&format!("tenant={value}")).field, "tenant", "{value}");
        }
        assert_eq!(
            problem("tenant=acme&tenant=other").to_string(),
            "`tenant`: is given twice; write it once"
        );
        for text in ["x".repeat(9000), format!("tenant={}", "x".repeat(9000))] {
            let error = problem(&text).to_string();
            assert!(error.len() < 300, "{} bytes", error.len());
        }
        assert!(!problem("\u{7}bell").to_string().contains('\u{7}'), "it is escaped");
    }

    #[test]
    fn queries_are_read_back_as_they_were_written() {
        let region: RegionId = "aws/us-east-1".parse().unwrap();
        let own = Reader { role: Role::Gateway, region: region.clone(), boot_id: 1 };
        let query = |path: &str| path.split_once('?').unwrap().1.to_owned();
        let (after, wait) = (Some(Generation { epoch: 1, number: 42 }), Duration::from_millis(250));
        for changes in [false, true] {
            let found = RoutesQuery::parse(&query(&routes(after, &own, changes, wait)));
            assert_eq!(found, Ok(RoutesQuery { after, wait, reader: Some(own.clone()), changes }));
        }
        let spoke = LeaseHolder { region, boot_id: 1 };
        assert_eq!(holder(&query(&lease(LeaseId::from_random(1), &spoke))), Ok(spoke));
        for query in ["", "holder=", "holder=gateway/aws/us-east-1/00000000000000ff", "lease=1"] {
            assert_eq!(holder(query).unwrap_err().field, "holder", "{query}");
        }
    }

    #[test]
    fn the_query_of_the_trusted_state_is_read_back() {
        let read = |path: &str| TrustQuery::parse(path.split_once('?').unwrap().1);
        for after in [None, Some(7)] {
            let wait = Duration::from_secs(5);
            assert_eq!(read(&trust(after, wait)), Ok(TrustQuery { after, wait }));
        }
        assert_eq!(TrustQuery::parse("wait_ms=60000").unwrap().wait, POLL_WAIT_MAX);
        assert_eq!(TrustQuery::parse("after=x").unwrap_err().field, "after");
    }

    #[test]
    fn polls_have_a_maximum_time_and_invalid_values_are_rejected() {
        let wait = |query: &str| RoutesQuery::parse(query).map(|query| query.wait);
        assert_eq!(RoutesQuery::parse(""), Ok(RoutesQuery::default()));
        assert_eq!(wait("wait_ms=30000"), Ok(POLL_WAIT_MAX));
        assert_eq!(wait("wait_ms=30001&else=1"), Ok(POLL_WAIT_MAX));
        for (query, field) in [
            ("after=42", "after"),
            ("after=1.42&reader=unknown", "reader"),
            ("wait_ms=-1", "wait_ms"),
            ("changes=1", "changes"),
        ] {
            assert_eq!(wait(query).unwrap_err().field, field, "{query}");
        }
    }
}
