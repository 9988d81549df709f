//! Tests with hubs whose responses are scripted.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

use axum::extract::{RawQuery, State};
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use backoff::Backoff;
use identity::Transport;
use regions::{RegionId, RouteTable};
use resolver::{DnsSection, Resolver};
use scheduler_api::plan::{DemandV1, GatewayBoot, GatewayDemand, WeightsV1};
use scheduler_api::reader::Reader;
use scheduler_api::route::{RouteTableV1, changes};
use scheduler_client::hub::{ControlPlaneClient, HubConnection, HubFailure, HubRequest, RESPONSE_BYTES_MAX};
use scheduler_client::operator::OperatorClient;
use scheduler_client::plan::PlanExchange;
use scheduler_client::snapshot::{PublishedMessage, Snapshot, restore};
use scheduler_client::table::{TablePoll, TableWatch, deregister};
use scheduler_core::hubs::Hubs;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const REGION: &str = "aws/us-east-1";
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(1), max: Duration::from_millis(2) };
const TIMEOUT: Duration = Duration::from_secs(10);

/// Hub that returns each scripted response once, and then 204 to every request.
#[derive(Clone, Default)]
struct ScriptedHub {
    responses: Arc<Mutex<VecDeque<(StatusCode, String)>>>,
    /// Method and path of each request.
    requests: Arc<Mutex<Vec<String>>>,
}

impl ScriptedHub {
    async fn start(responses: impl IntoIterator<Item = (u16, Value)>) -> (ScriptedHub, String) {
        async fn respond(
            State(hub): State<ScriptedHub>,
            method: Method,
            uri: Uri,
            RawQuery(query): RawQuery,
        ) -> Response {
            let query = query.map(|query| format!("?{query}")).unwrap_or_default();
            hub.requests.lock().unwrap().push(format!("{method} {}{query}", uri.path()));
            let next = hub.responses.lock().unwrap().pop_front();
            next.unwrap_or((StatusCode::NO_CONTENT, String::new())).into_response()
        }
        let hub = ScriptedHub::default();
        for (status, body) in responses {
            let body = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
            hub.responses.lock().unwrap().push_back((StatusCode::from_u16(status).unwrap(), body));
        }
        let router = axum::Router::new().fallback(respond).with_state(hub.clone());
        let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", socket.local_addr().unwrap());
        tokio::spawn(axum::serve(socket, router).into_future());
        (hub, url)
    }

    fn last_request(&self) -> String {
        self.requests.lock().unwrap().last().cloned().unwrap_or_default()
    }

    fn count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

/// Returns the URL of a port without a listener.
async fn closed() -> String {
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: SocketAddr = socket.local_addr().unwrap();
    format!("http://{address}")
}

fn client(urls: &[&str]) -> ControlPlaneClient {
    let hubs = Hubs::at(urls).unwrap();
    ControlPlaneClient::new(&hubs, &Transport::Loopback, Resolver::new(&DnsSection::default())).unwrap()
}

fn table(number: u64) -> (u16, Value) {
    let table = json!({"version": 1, "epoch": 1, "generation": number, "deployments": [], "regions": []});
    (200, table)
}

fn watch(role: &str, urls: &[&str], file: Option<&Path>) -> TableWatch {
    let reader: Reader = format!("{role}/{REGION}/00000000000000ff").parse().unwrap();
    let snapshot = Snapshot::new(file.map(Path::to_owned), None);
    TableWatch::new(client(urls), reader, snapshot, BACKOFF)
}

/// Returns the number of the newer table, `Some(0)` if the current one was confirmed, and `None` after a failure.
async fn poll(watch: &mut TableWatch) -> Option<u64> {
    match watch.next(|_| {}).await {
        TablePoll::Newer(table) => Some(table.generation.number),
        TablePoll::Confirmed => Some(0),
        TablePoll::Failed { .. } => None,
    }
}

/// Returns the valid message of a file.
fn stored<M: PublishedMessage>(file: &Path) -> Option<M::Content> {
    restore::<M>(file, || {})
}

/// Invariant 5, Monotonic plans.
#[tokio::test]
async fn only_newer_tables_are_accepted_and_each_is_on_disk_before_it_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("routes");
    let other_version = (200, json!({"version": 9, "epoch": 1, "generation": 4}));
    let offered =
        [table(3), table(2), table(3), table(u64::MAX), other_version, (200, json!("torn")), table(4)];
    let (hub, url) = ScriptedHub::start(offered).await;
    let mut watch = watch("spoke", &[&url], Some(&file));
    let rejected = [(None, 3); 5];
    for (polled, expected) in [&[(Some(3), 3)], &rejected[..], &[(Some(4), 4), (Some(0), 4)]].concat() {
        assert_eq!(poll(&mut watch).await, polled);
        assert_eq!(stored::<RouteTableV1>(&file).map(|table| table.generation.number), Some(expected));
    }
    assert_eq!(
        hub.last_request(),
        "GET /v1/routes?after=1.4&reader=spoke/aws/us-east-1/00000000000000ff&changes=true&wait_ms=5000"
    );
}

#[tokio::test]
async fn changes_are_applied_to_the_table_of_the_hub_and_otherwise_the_whole_table_is_requested() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("routes");
    let whole = |number: u64| {
        let wire: RouteTableV1 = serde_json::from_value(table(number).1).unwrap();
        RouteTable::try_from(wire).unwrap()
    };
    let step = |from: u64, to: u64| {
        let (base, table) = (whole(from), whole(to));
        let checksum = changes::checksum(&RouteTableV1::from(&table));
        serde_json::to_value(changes::changes(&base, &table, checksum)).unwrap()
    };
    let response = |steps: &[Value]| (200, json!({"changes": steps}));
    let mut wrong = step(5, 6);
    wrong["checksum"] = json!(0);
    let offered = [
        table(3),
        response(&[step(3, 4), step(4, 5)]),
        response(&[wrong]),
        table(6),
        response(&[step(5, 7)]),
        response(&[step(6, 7)]),
        table(8),
    ];
    let (hub, url) = ScriptedHub::start(offered).await;
    let mut watch = watch("gateway", &[&url], Some(&file));
    let requests_changes = |hub: &ScriptedHub| hub.last_request().contains("changes=true");
    for (polled, expected, has_requested) in [
        (Some(3), 3, false),
        (Some(5), 5, true),
        (None, 5, true),
        (Some(6), 6, false),
        (None, 6, true),
        (None, 6, false),
        (Some(8), 8, false),
    ] {
        // Members that this process adds are no part of the table that changes are applied to.
        let next = watch.next(|table| table.tenants = Some(Default::default())).await;
        let number = match next {
            TablePoll::Newer(table) => Some(table.generation.number),
            TablePoll::Confirmed => Some(0),
            TablePoll::Failed { is_rejected } => {
                assert!(is_rejected);
                None
            }
        };
        let stored = stored::<RouteTableV1>(&file).map(|table| table.generation.number);
        assert_eq!((number, stored, requests_changes(&hub)), (polled, Some(expected), has_requested));
    }
}

#[tokio::test]
async fn a_table_is_completed_before_it_is_written_and_a_rejection_is_distinguished_from_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("routes");
    let (_hub, url) = ScriptedHub::start([table(3), table(1), (503, json!({}))]).await;
    let mut watch = watch("gateway", &[&url], Some(&file));
    let completed = watch.next(|table| table.tenants = Some(Default::default())).await;
    assert!(matches!(completed, TablePoll::Newer(table) if table.tenants.is_some()));
    assert!(stored::<RouteTableV1>(&file).unwrap().tenants.is_some());
    for is_rejected in [true, false] {
        let failed = watch.next(|_| {}).await;
        assert!(
            matches!(failed, TablePoll::Failed { is_rejected: found } if found == is_rejected),
            "{failed:?}"
        );
    }
}

#[tokio::test]
async fn a_gateway_without_a_table_polls_the_next_hub_and_a_spoke_does_not() {
    for (role, polls) in [("gateway", [None, None, Some(7)]), ("spoke", [None, Some(0), Some(0)])] {
        let ((_, empty), (_, full), gone) =
            (ScriptedHub::start([]).await, ScriptedHub::start([table(7)]).await, closed().await);
        let mut watch = watch(role, &[&gone, &empty, &full], None);
        for polled in polls {
            assert_eq!(poll(&mut watch).await, polled, "{role}");
        }
    }
}

#[tokio::test]
async fn a_failed_hub_is_left_at_once_and_the_next_call_is_delayed_after_all_have_failed() {
    let (hub, url) =
        ScriptedHub::start([(404, json!({})), (500, json!({})), (200, json!(8)), (200, json!(7))]).await;
    let client = client(&[&closed().await, &url]);
    let mut connection = HubConnection::new(client.clone(), "test", BACKOFF);
    let request = HubRequest::new(Method::GET, "/", TIMEOUT).optional();
    let mut call = async || {
        connection.ready().await;
        let response = connection.call(&request, async |number: Option<u64>| match number {
            Some(8) => Err(HubFailure::Invalid("another number".to_owned())),
            number => Ok(number),
        });
        (response.await.map_err(|error| error.failure.status()), connection.is_failing())
    };
    assert_eq!(call().await, (Err(None), true), "connection refused");
    assert_eq!(call().await, (Ok(None), false), "not found is a response");
    assert_eq!(client.hubs().current(), url);
    for status in [Some(StatusCode::INTERNAL_SERVER_ERROR), None] {
        assert_eq!(call().await, (Err(status), true));
        assert_ne!(client.hubs().current(), url, "{status:?}");
        assert_eq!(call().await, (Err(None), true), "connection refused");
        assert_eq!(client.hubs().current(), url);
    }
    assert_eq!(call().await, (Ok(Some(7)), false));
    assert_eq!(hub.count(), 4);
}

#[tokio::test]
async fn an_error_names_the_hub_and_its_reason_within_a_limit() {
    let long = "x".repeat(5000);
    let rejected = json!({"error": {"message": "the token is unknown"}});
    let (_hub, url) =
        ScriptedHub::start([(401, rejected), (502, json!(long)), (503, json!("")), (200, json!("{"))]).await;
    let client = client(&[&url]);
    let error = async || {
        let sent = client.send::<u64>(&HubRequest::new(Method::GET, "/", TIMEOUT)).await;
        sent.unwrap_err().to_string()
    };
    assert_eq!(error().await, format!("the hub at {url} returned 401 Unauthorized: the token is unknown"));
    let proxy = error().await;
    assert!(proxy.len() < 700 && proxy.contains("502 Bad Gateway: xxx"), "{proxy}");
    assert!(error().await.ends_with("503 Service Unavailable: no reason given"));
    assert!(error().await.contains("sent an invalid response: invalid type: map"));
    assert!(error().await.contains("sent an invalid response: invalid type: null"), "204 without a body");
}

#[tokio::test]
async fn a_response_at_the_limit_is_read_and_one_past_it_is_rejected() {
    let text = |bytes: usize| (200, json!(format!("\"{}\"", "x".repeat(bytes - 2))));
    let (_hub, url) = ScriptedHub::start([text(RESPONSE_BYTES_MAX), text(RESPONSE_BYTES_MAX + 1)]).await;
    let client = client(&[&url]);
    let receive = async || client.send::<String>(&HubRequest::new(Method::GET, "/", TIMEOUT)).await;
    assert!(receive().await.is_ok_and(|text| text.len() == RESPONSE_BYTES_MAX - 2));
    assert!(receive().await.unwrap_err().to_string().contains("it has more than"));
}

#[tokio::test]
async fn rows_of_another_gateway_and_older_rows_are_rejected_and_failures_change_no_hub() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plan");
    let rows = |gateway: &str, number: u64| {
        (200, json!({"version": 1, "epoch": 1, "generation": number, "gateway": gateway, "rows": []}))
    };
    let other = "aws/eu-west-1";
    let responses = [rows(other, 3), rows(REGION, 2), rows(REGION, 1), (503, json!({})), rows(REGION, 3)];
    let (hub, url) = ScriptedHub::start(responses).await;
    let client = client(&[&url, &closed().await]);
    let gateway: RegionId = REGION.parse().unwrap();
    let boot = GatewayBoot { region: gateway.clone(), boot_id: 1 };
    let demand = DemandV1::from(&GatewayDemand {
        gateway: boot,
        classes: Default::default(),
        reachable_regions: None,
    });
    let mut exchange = PlanExchange::new(client.clone(), gateway, Snapshot::new(Some(file.clone()), None));
    let number = || stored::<WeightsV1>(&file).map(|rows| rows.generation.number);
    for (accepted, expected) in
        [(false, None), (true, Some(2)), (false, Some(2)), (false, Some(2)), (true, Some(3))]
    {
        let rows = exchange.exchange(&demand).await;
        assert_eq!(rows.is_ok_and(|rows| rows.is_some()), accepted);
        assert_eq!(number(), expected);
        assert_eq!(client.hubs().current(), url, "a hub without a plan stays the current one");
    }
    assert_eq!(exchange.exchange(&demand).await.unwrap().map(|rows| rows.generation), None);
    assert_eq!(hub.last_request(), "POST /v1/demand?after=1.3");
}

#[tokio::test]
async fn a_demand_is_sent_as_changes_and_completely_when_the_hub_does_not_have_the_last_one() {
    let ok = || (200, Value::Null);
    let unknown = (409, json!({"error": {"code": "unknown_base", "message": "no"}}));
    let (hub, url) = ScriptedHub::start([ok(), ok(), unknown, ok(), ok()]).await;
    let gateway: RegionId = REGION.parse().unwrap();
    let demand = DemandV1::from(&GatewayDemand {
        gateway: GatewayBoot { region: gateway.clone(), boot_id: 1 },
        classes: Default::default(),
        reachable_regions: Some([gateway.clone()].into()),
    });
    let mut exchange = PlanExchange::new(client(&[&url]), gateway, Snapshot::new(None, None));
    for requests in [1, 2, 4, 5] {
        exchange.exchange(&demand).await.unwrap();
        assert_eq!(hub.count(), requests, "the third is repeated completely");
    }
}

#[tokio::test]
async fn a_reader_is_deregistered_and_an_unreachable_hub_is_ignored() {
    let reader: Reader = format!("gateway/{REGION}/00000000000000ff").parse().unwrap();
    let (hub, url) = ScriptedHub::start([(202, json!(""))]).await;
    deregister(&client(&[&url]), &reader).await;
    assert_eq!(hub.last_request(), "DELETE /v1/readers/gateway/aws/us-east-1/00000000000000ff");
    deregister(&client(&[&closed().await]), &reader).await;
}

#[tokio::test]
async fn an_operator_calls_each_hub_once_until_one_accepts() {
    let (first, second) = (ScriptedHub::start([(503, json!({}))]).await, ScriptedHub::start([]).await);
    let hubs = Hubs::at([&first.1, &second.1]).unwrap();
    let operator = OperatorClient::new(&hubs, &Transport::Loopback, TIMEOUT).unwrap();
    let region: RegionId = REGION.parse().unwrap();
    operator.set_draining(&region, true).await.unwrap();
    operator.set_draining(&region, false).await.unwrap();
    assert_eq!((first.0.count(), second.0.count()), (1, 2));
    assert_eq!(first.0.last_request(), "PUT /v1/drains/aws/us-east-1");
    assert_eq!(second.0.last_request(), "DELETE /v1/drains/aws/us-east-1");
    let hubs = Hubs::at([closed().await]).unwrap();
    let operator = OperatorClient::new(&hubs, &Transport::Loopback, TIMEOUT).unwrap();
    let error = operator.get::<Value>(scheduler_api::paths::PLAN).await.unwrap_err();
    assert!(matches!(error.failure, HubFailure::Unreachable(_)), "{error}");
}
