// What Java programs send: the JDK's HttpClient as it is by default, which offers HTTP/2 by an Upgrade on plain HTTP.
// `java JdkClient.java URL COUNT BODY…` posts each BODY to URL COUNT times, one after the other on one client, and prints
// for each answer its version, its status and what it says of the connection, and its lines as they came.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.stream.Stream;

public class JdkClient {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        int count = Integer.parseInt(arguments[1]);
        for (int i = 0; i < count * (arguments.length - 2); i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(arguments[2 + i / count]))
                .build();
            HttpResponse<Stream<String>> answer = client.send(request, HttpResponse.BodyHandlers.ofLines());
            String connection = answer.headers().firstValue("Connection").orElse("kept");
            System.out.println(answer.version() + " " + answer.statusCode() + " " + connection);
            try (Stream<String> lines = answer.body()) {
                lines.forEach(System.out::println);
            }
        }
    }
}
